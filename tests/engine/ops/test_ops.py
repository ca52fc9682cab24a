"""A decoder's operations: right, and the same bits at any place of any batch, on every path."""

import math
from pathlib import Path

import pytest
import structlog
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.models.rotary import RotaryTable
from engine.ops import DecoderOps, Draw, choose, choose_ops
from engine.ops import native_library as native
from engine.ops.native_attention import NativeAttention, NativeKVCache
from engine.runner.attention import AttentionShape
from engine.runner.kv_cache import KVShape
from engine.sampling.noise import stream_key
from lora_kernels.errors import KernelUnavailable
from tests.support.decoder_ops import make_ops, ops_names

DTYPES = [torch.float32, torch.bfloat16]
INV_FREQ = (1.0, 0.3, 0.01, 0.0004)


@pytest.fixture(params=ops_names())
def ops(request: pytest.FixtureRequest) -> DecoderOps:
    return make_ops(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_independent(function, x: torch.Tensor, tile: int = 1) -> None:
    whole = function(x.clone())
    for start, count in [(0, 16), (5, 16), (3, 48), (100, 160), (17, 400), (7, 1), (9, 13)]:
        if count % tile == 0:
            part = function(x[start : start + count].clone())
            assert torch.equal(part, whole[start : start + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 33, 576])
def test_norms_equal_transformers(ops, dtype, size):
    x, weight = random(7, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    theirs = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    theirs.weight.data = weight
    expected = theirs(x)
    torch.testing.assert_close(ops.norm(x, weight, 1e-5), expected)
    # Heads of a wider row are normed each for itself, where they lie.
    wide = torch.zeros(7, 3 * size, dtype=dtype)
    heads = wide.view(7, 3, size)[:, :2]
    heads[:, 0], heads[:, 1] = x, x.flip(0)
    got = ops.norm(heads, weight, 1e-5)
    torch.testing.assert_close(got[:, 0], expected)
    torch.testing.assert_close(got[:, 1], expected.flip(0))


def test_a_float_weight_is_applied_before_the_only_rounding(ops):
    x, weight = random(5, 48, dtype=torch.bfloat16), random(48, seed=1)
    wide = x.float()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    torch.testing.assert_close(ops.norm(x, weight, 1e-6), expected.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_is_added_in_place_and_the_rounded_sum_is_normed(ops, dtype):
    x, update = random(5, 70, dtype=dtype), random(5, 70, dtype=dtype, seed=2)
    weight = random(70, dtype=dtype, seed=1)
    total = x + update
    normed = ops.add_and_norm_(x, update, weight, 1e-5)
    assert torch.equal(x, total)
    assert torch.equal(normed, ops.norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gated_activations_equal_torch(ops, dtype, name):
    gate_up = (random(5, 2 * 37) * 20).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 300.0, -300.0])
    gate, up = gate_up[:, :37], gate_up[:, 37:]
    wide = gate.float()
    activated = F.silu(wide) if name == "silu" else F.gelu(wide, approximate="tanh")
    expected = activated.to(dtype) * up
    atol = 2e-5 if dtype is torch.float32 else 0.3
    torch.testing.assert_close(ops.activate(gate_up, name), expected, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_activations_are_precise_in_float32(ops, name):
    gate = torch.linspace(-12, 12, 4001)
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=1)
    exact = F.silu(gate.double()) if name == "silu" else F.gelu(gate.double(), approximate="tanh")
    assert (ops.activate(gate_up, name)[:, 0].double() - exact).abs().max() < 2e-6


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("channels", [8, 10], ids=["all", "some"])
def test_rotation_equals_transformers(ops, heads, channels):
    positions = torch.tensor([0, 5, 63, 499])
    x = random(4, heads + 1, channels)
    angles = torch.outer(positions.float(), torch.tensor(INV_FREQ)).repeat(1, 2)
    part = x[:, :heads, :8]
    expected, _ = apply_rotary_pos_emb(part, part, angles.cos() * 1.5, angles.sin() * 1.5)
    untouched = x.clone()
    got = ops.rotation(RotaryTable(INV_FREQ, 1.5, 500), positions)(x[:, :heads])
    torch.testing.assert_close(got[..., :8], expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(got[..., 8:], untouched[:, :heads, 8:])
    assert torch.equal(x[:, heads], untouched[:, heads])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_the_batch(ops, dtype, threads):
    x, weight = random(512, 346, dtype=dtype), random(346, dtype=dtype)
    assert_rows_independent(lambda rows: ops.norm(rows, weight, 1e-5), x)
    for name in ("silu", "gelu_pytorch_tanh"):
        assert_rows_independent(lambda rows, name=name: ops.activate(rows, name), x * 4)
    table = RotaryTable(INV_FREQ, 1.0, 1024)
    heads = random(512, 9, 8, dtype=dtype)
    whole = ops.rotation(table, torch.arange(512))(heads.clone())
    part = ops.rotation(table, torch.arange(17, 400))(heads[17:400].clone())
    assert torch.equal(part, whole[17:400])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("sizes", [(576, 960), (48, 200), (37, 51)], ids=str)
# The sets between leave linears to PyTorch.
@pytest.mark.parametrize("name", sorted({ops_names()[0], ops_names()[-1]}))
def test_a_linears_row_does_not_depend_on_the_batch(name, dtype, keep_rows, sizes, threads):
    ops = make_ops(name)
    weight, bias = random(sizes[1], sizes[0], dtype=dtype), random(sizes[1], dtype=dtype)
    linear = ops.make_linear(weight, bias, keep_rows=keep_rows)
    x = random(512, sizes[0], dtype=dtype)
    assert_rows_independent(linear, x, ops.row_tile(dtype))
    expected = F.linear(x.double(), weight.double(), bias.double())
    scale = expected.abs().max().item()
    assert (linear(x).double() - expected).abs().max() < 8 * scale * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(48, 200), (37, 51)], ids=str)
def test_a_kept_weight_gives_its_rows_back(ops, dtype, sizes):
    weight = random(sizes[1], sizes[0], dtype=dtype)
    rows = torch.tensor([0, 50, 31, 32, 31])
    assert torch.equal(ops.make_linear(weight, keep_rows=True).take_rows(rows), weight[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 16, 1000])
def test_argmax_is_the_lowest_of_the_largest_and_finds_what_is_not_finite(
    ops, dtype, size, threads
):
    logits = random(9, size, dtype=dtype)
    logits[1] = -1.0
    logits[2, size - 1], logits[2, size - 2] = 50, 50
    logits[3, 4], logits[4, 0], logits[5, size - 1] = float("nan"), float("inf"), float("-inf")
    logits[6, 1] = float("-inf")
    expected = logits.argmax(dim=-1).tolist()
    expected[3:7] = [-1, -1, -1, -1]
    assert ops.argmax(logits) == expected
    assert ops.argmax(logits)[1:3] == [0, size - 2]


def test_names_choose_a_path():
    assert choose_ops("torch").name == "torch"
    with pytest.raises(ValueError, match="auto, native or torch"):
        choose_ops("numba")


def test_without_the_library_auto_falls_back_and_says_why(monkeypatch):
    def unavailable() -> native.NativeLibrary:
        raise KernelUnavailable("it was not built")

    monkeypatch.setattr(choose, "load_native_library", unavailable)
    ops = choose_ops()
    assert ops.name == "torch"
    assert ops.fallback_reason is not None and "it was not built" in ops.fallback_reason
    with pytest.raises(KernelUnavailable, match="not built"):
        choose_ops("native")


def test_a_file_that_is_no_library_is_named(tmp_path: Path):
    path = tmp_path / "_native.so"
    path.write_bytes(b"not an object file")
    with pytest.raises(KernelUnavailable, match=r"_native\.so cannot be loaded"):
        native.load_native_library(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 16, 1000])
def test_paths_draw_alike_and_a_draw_does_not_depend_on_the_others(ops, dtype, size, threads):
    logits = (random(40, size, dtype=torch.float32) * 3).to(dtype)
    logits[:, 3] = -300.0
    draws = [
        Draw(row, best, stream_key(row, 0, 7), 0.3 + row / 20, 0.0 if row % 3 else 0.02)
        for row, best in enumerate(ops.argmax(logits))
    ]
    drawn = ops.draw(logits, draws)
    assert [ops.draw(logits, [draw])[0] for draw in draws] == drawn
    # An exponential's last bit may decide between two tokens: once in millions of draws.
    assert drawn == choose_ops("torch").draw(logits, draws)
    assert 3 not in drawn
    assert len(set(drawn)) > 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_masked_logit_is_never_drawn_and_changes_no_other_draw(ops, dtype):
    logits = random(8, 1000, dtype=dtype)
    masked = logits.clone()
    masked[:, ::2] = -math.inf
    best = masked.argmax(-1).tolist()
    keys = [stream_key(seed, 0, 0) for seed in range(40)]
    draws = [Draw(row, best[row], key, 1.5, 0.0) for row in range(8) for key in keys]
    drawn = ops.draw(masked, draws)
    assert all(token_id % 2 for token_id in drawn)
    assert drawn == choose_ops("torch").draw(masked, draws)
    far = torch.where(masked == -math.inf, -1e4, masked)
    assert ops.draw(far, draws) == drawn


def test_min_p_and_a_cold_temperature_leave_only_the_best(ops):
    logits = torch.tensor([[1.0, 4.0, 3.9, 2.0]])
    keys = [stream_key(seed, 0, 0) for seed in range(200)]
    assert set(ops.draw(logits, [Draw(0, 1, key, 1.0, 0.95) for key in keys])) == {1}
    assert set(ops.draw(logits, [Draw(0, 1, key, 1.0, 0.5) for key in keys])) == {1, 2}
    assert set(ops.draw(logits, [Draw(0, 1, key, 1e-4, 0.0) for key in keys])) == {1}
    assert set(ops.draw(logits, [Draw(0, 1, key, 1.0, 1.5) for key in keys])) == {1}


@pytest.mark.parametrize(
    ("head_dim", "block_size", "reason"),
    [
        (64, 16, None),
        (64, 32, "block_size is 32, not 16"),
        (24, 16, "heads have 24 channels"),
        (272, 16, "heads have 272 channels"),
    ],
)
def test_attention_that_the_compiled_kernel_does_not_take_is_told_at_the_start(
    ops: DecoderOps, head_dim: int, block_size: int, reason: str | None
):
    if ops.name == "torch":
        reason = None  # all of it runs through PyTorch, as is told once
    shape = {"num_kv_heads": 1, "head_dim": head_dim, "block_size": block_size}
    with structlog.testing.capture_logs() as logs:
        attention = ops.make_attention(
            AttentionShape(num_heads=2, windows=(None,), scale=head_dim**-0.5, **shape)
        )
    cache = ops.make_kv_cache(KVShape(num_layers=1, dtype=torch.float32, **shape), 2)
    is_compiled = ops.name != "torch" and reason is None
    assert isinstance(attention, NativeAttention) == is_compiled
    assert isinstance(cache, NativeKVCache) == is_compiled
    assert [line["log_level"] for line in logs] == ["warning"] * (reason is not None)
    assert all(reason in line["reason"] for line in logs if reason)
