"""Norms, activations, rotation and stored keys and values, against PyTorch's operations."""

import pytest
import torch
import triton
import triton.language as tl

from engine.models.rotary import RotaryTable
from engine.ops import HeadNorms, TorchOps
from engine.runner.kv_cache import KVShape
from engine.triton import fp8
from engine.triton.kv_cache import FP8
from engine.triton.ops import TritonOps

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
OPS = TritonOps("cpu", max_positions=64)
TORCH = TorchOps()


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[expected.dtype] * max(1.0, expected.abs().max().item())
    assert (got.double() - expected.double()).abs().max().item() <= limit


def assert_near(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Within two roundings of float64, and no NaN."""
    assert got.shape == exact.shape
    if exact.numel():
        limit = TOLERANCE[got.dtype] * max(1.0, exact.abs().max().item())
        assert (got.double() - exact).abs().max().item() <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 33, 128])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["llama", "gemma"])
def test_norms(dtype, size, weight_dtype):
    x, weight = random(3, 2 * size, dtype=dtype), random(size, seed=1).to(weight_dtype or dtype)
    rows = x[:, :size]  # a row's columns are adjacent, rows are further apart
    assert_close(OPS.norm(rows, weight, 1e-5), TORCH.norm(rows, weight, 1e-5))
    heads = random(3, 5, size, dtype=dtype)[:, 1:4]
    assert_close(OPS.norm(heads, weight, 1e-5), TORCH.norm(heads, weight, 1e-5))
    x, update = rows.clone(), random(3, size, dtype=dtype, seed=2)
    expected_x = x.clone()
    expected = TORCH.add_and_norm_(expected_x, update, weight, 1e-5)
    assert_close(OPS.add_and_norm_(x, update, weight, 1e-5), expected)
    assert torch.equal(x, expected_x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [5, 1025])
def test_activations(dtype, activation, size):
    gate_up = (random(2, 2 * size) * 6).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 300.0, -300.0])
    assert_close(OPS.activate(gate_up, activation), TORCH.activate(gate_up, activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_every_kernel_is_near_its_definition_in_float64(dtype, num_rows):
    """From none to a few rows of odd sizes, into memory that is poison."""
    x, update = (random(num_rows, 33, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(33, dtype=dtype, seed=2)

    def normed(values: torch.Tensor) -> torch.Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_near(OPS.norm(x, weight, 1e-5), normed(x))
    summed = x.clone()
    got = OPS.add_and_norm_(summed, update, weight, 1e-5)
    assert_near(summed, x.double() + update.double())
    assert_near(got, normed(summed))

    gate_up = random(num_rows, 2 * 17, dtype=dtype, seed=3) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(OPS.activate(gate_up, "silu"), gate * gate.sigmoid() * up)
    cubed = 0.044715 * gate**3
    gelu = 0.5 * gate * (1 + ((2 / torch.pi) ** 0.5 * (gate + cubed)).tanh())
    assert_near(OPS.activate(gate_up, "gelu_pytorch_tanh"), gelu * up)

    table = RotaryTable(tuple(0.5**i for i in range(5)), 1.25, 64)
    positions, slots = torch.tensor([63, 0, 7])[:num_rows], torch.tensor([17, -1, 3])[:num_rows]
    heads = random(num_rows, 3 + 2, 14, dtype=dtype, seed=4)  # 10 of 14 channels turn
    angle = positions.double()[:, None, None] * torch.tensor([0.5**i for i in range(5)]).double()
    cos, sin = 1.25 * angle.cos(), 1.25 * angle.sin()
    first, second, rest = heads[:, :4].double().split([5, 5, 4], dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    values = heads[:, 4].clone()
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=14, block_size=16, dtype=dtype)
    cache = OPS.make_kv_cache(shape, 2)
    assert_near(OPS.rotation(table, positions).store(heads, 3, cache, 0, slots), turned[:, :3])
    keys_there, values_there = (part.flatten(1, 2)[0] for part in cache.layer(0))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_near(keys_there[slot], turned[token, 3])
            assert torch.equal(values_there[slot], values[token])
    untouched = [slot for slot in range(32) if slot not in slots.tolist()]
    assert keys_there[untouched].isnan().all() and values_there[untouched].isnan().all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "angles", "has_norms", "is_fp8", "dtype"),
    [
        (5, 2, 16, 8, False, False, torch.float32),
        (2, 1, 80, 40, True, False, torch.float16),
        (3, 1, 32, 6, False, True, torch.float16),
        (9, 3, 24, 7, True, False, torch.float32),
    ],
)
def test_rotation_with_its_neighbours_is_the_same_as_one_after_the_other(
    heads, kv_heads, head_dim, angles, has_norms, is_fp8, dtype
):
    tokens = 5
    table = RotaryTable(tuple(0.5**i for i in range(angles)), 1.25, 64)
    positions = torch.tensor([0, 63, 7, 7, 30])
    slots = torch.tensor([17, -1, 3, 40])  # the last token is padding
    x = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = HeadNorms(random(head_dim, dtype=dtype, seed=1), random(head_dim, seed=2), 1e-6)
    norms = norms._replace(key=norms.key.to(dtype)) if has_norms else None
    shape = KVShape(
        num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16,
        dtype=FP8 if is_fp8 else dtype,
    )  # fmt: skip
    cache = OPS.make_kv_cache(shape, 3)
    cache._storage.fill_(7)
    if is_fp8:
        cache.set_scales(torch.full_like(cache.scales, 0.01))

    query, key, value = x.split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query = TORCH.norm(query, norms.query, 1e-6)
        key = TORCH.norm(key, norms.key, 1e-6)
    turn = TORCH.rotation(table, positions)
    expected_query, expected_key = turn(query), turn(key)
    before, values_before = x.clone(), value.clone()
    got = OPS.rotation(table, positions).store(x, heads, cache, 1, slots, norms)
    assert_close(got, expected_query)
    assert torch.equal(x[:, heads:], before[:, heads:])

    flat = [part.flatten(1, 2) for part in cache.layer(1)]
    for stored, expected in zip(flat, (expected_key, values_before), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0 and is_fp8:
                codes = (expected[token].float() / 0.01).clamp(-448, 448).to(FP8)
                read = stored[:, slot].view(FP8).double()
                # Where the last bit of a float16 rotation differs, so may the nearest 8-bit number.
                assert (read - codes.double()).abs().max() <= codes.double().abs().max() / 8
                assert (read != codes.double()).double().mean() < 0.1
            elif slot >= 0:
                assert_close(stored[:, slot], expected[token])
        untouched = [slot for slot in range(stored.shape[1]) if slot not in slots.tolist()]
        assert (stored[:, untouched] == 7).all()
    assert (cache._storage[0] == 7).all()

    heads_only = random(tokens, heads, head_dim, dtype=dtype, seed=5)
    expected = turn(heads_only.clone())
    assert_close(OPS.rotation(table, positions)(heads_only), expected)


@triton.jit
def _round_trip(codes_ptr, values_ptr, from_ptr, IS_NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    read = fp8.from_bytes(tl.load(codes_ptr + o), tl.float32, IS_NATIVE) * fp8.unit(IS_NATIVE)
    tl.store(values_ptr + o, read)
    tl.store(codes_ptr + o, fp8.to_bytes(tl.load(from_ptr + o)))


@pytest.mark.parametrize("is_native", [False, True])
def test_every_8_bit_float_is_read_and_the_nearest_one_written(is_native):
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes.view(FP8).float()
    values, written = torch.empty(256), codes.clone()
    _round_trip[1,](written, values, exact, is_native, BLOCK=256)
    known = exact.isfinite() if is_native else slice(None)  # the interpreter takes NaN for 480
    torch.testing.assert_close(values[known], exact[known], rtol=0, atol=0, equal_nan=True)
    back = written.view(FP8).float()
    torch.testing.assert_close(back, exact, rtol=0, atol=0, equal_nan=True)

    finite = exact[exact.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2  # ties, which go to the even one
    others = torch.cat((middles, middles * 1.0001, middles * 0.9999, random(256) * 100))
    others = torch.cat((others, torch.tensor([500.0, -1e30, float("inf"), 1e-9, -1e-40])))
    for part in others.split(256):
        padded = torch.zeros(256)
        padded[: len(part)] = part
        _round_trip[1,](codes.clone(), values, padded, is_native, BLOCK=256)
        written = codes.clone()
        _round_trip[1,](written, values, padded, is_native, BLOCK=256)
        expected = padded.clamp(-448, 448).to(FP8)
        assert torch.equal(written.view(FP8).float(), expected.float())
