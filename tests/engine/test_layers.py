"""Element-wise parts: right, and the same bits at any place of any batch."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.models.layers import RotaryTable, rms_norm, silu_and_mul
from engine.models.linear import Linear

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_independent(function, x: torch.Tensor) -> None:
    whole = function(x)
    for start, count in [(0, 16), (5, 16), (3, 48), (100, 160), (17, 400)]:
        assert torch.equal(function(x[start : start + count]), whole[start : start + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_transformers(dtype):
    x, weight = random(7, 33, dtype=dtype), random(33, dtype=dtype, seed=1)
    theirs = LlamaRMSNorm(33, eps=1e-5).to(dtype)
    theirs.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-5), theirs(x))


def test_gated_silu_equals_torch():
    gate_up = random(5, 34) * 20
    expected = F.silu(gate_up[:, :17]) * gate_up[:, 17:]
    torch.testing.assert_close(silu_and_mul(gate_up), expected)


def test_rotation_equals_transformers():
    inv_freq = (1.0, 0.3, 0.01, 0.0004)
    positions = torch.tensor([0, 5, 63, 499])
    heads = random(4, 3, 8)
    angles = torch.outer(positions.float(), torch.tensor(inv_freq)).repeat(1, 2)
    expected, _ = apply_rotary_pos_emb(heads, heads, angles.cos() * 1.5, angles.sin() * 1.5)
    got = RotaryTable(inv_freq, 1.5, 500).lookup(positions)(heads)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_activations_of_a_row_do_not_depend_on_the_batch(dtype, threads):
    x, weight = random(512, 346, dtype=dtype), random(346, dtype=dtype)
    assert_rows_independent(lambda rows: rms_norm(rows, weight, 1e-5), x)
    assert_rows_independent(silu_and_mul, x * 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("sizes", [(576, 960), (48, 200), (37, 51)], ids=str)
def test_a_linears_row_does_not_depend_on_the_batch(dtype, pack, sizes, threads):
    weight, bias = random(sizes[1], sizes[0], dtype=dtype), random(sizes[1], dtype=dtype)
    linear = Linear(weight, bias, pack=pack)
    assert_rows_independent(linear, random(512, sizes[0], dtype=dtype))
    x = random(16, sizes[0], dtype=dtype, seed=5)
    expected = F.linear(x.double(), weight.double(), bias.double())
    scale = expected.abs().max().item()
    assert (linear(x).double() - expected).abs().max() < 8 * scale * torch.finfo(dtype).eps
