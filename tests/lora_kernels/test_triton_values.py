"""Every kernel in Triton's interpreter against the reference; pools and scratch are poisoned."""

import pytest
import torch

from lora_kernels import LoraBatch
from lora_kernels.tiles import VARIANTS
from tests.support.device_lora import (
    assert_like_reference,
    device_batch,
    on_device,
    updated,
)
from tests.support.lora_cases import make_rows, make_table

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RUNS = {
    "distinct": ([2, 0, 3, 1], [1, 1, 1, 1]),
    "uniform": ([0, 1, 2, 3], [2, 2, 2, 2]),
    "zipf": ([0, 1, 2, 3], [6, 3, 2, 1]),
    "identical": ([1, 1, 1], [2, 1, 3]),
    "skewed": ([0, 3], [9, 1]),
    "AABA": ([0, 0, 1, 0], [1, 2, 1, 1]),
    "ABAB": ([0, 1, 0, 1], [1, 1, 2, 1]),
    "empty segments": ([0, 1, 2, 3], [0, 3, 0, 2]),
    "base rows": ([None, 2, None, 0, None], [2, 1, 1, 2, 2]),
    "only base rows": ([None], [4]),
    "one row": ([3], [1]),
}
RANKS = [[8, 8, 8], [4, None, 16], [None, None, 3], [9, 1, None]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("popularity", RUNS)
def test_every_popularity(popularity, variant, dtype):
    table = make_table(48, [40, 16, 16], RANKS, dtype=dtype)
    batch = LoraBatch.from_runs(*RUNS[popularity])
    y, x = make_rows(table, batch, dtype)
    device = on_device(table, dtype)
    got = updated(y, x, device, device_batch(batch, device, variant=variant))
    assert_like_reference(y, x, table, batch, got)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rank", [1, 2, 3, 8, 12, 16, 24, 40, 64, 256])
@pytest.mark.parametrize(
    ("in_features", "out", "dtype"),
    [(37, 51, torch.float16), (96, 64, torch.float32)],
    ids=["odd sizes", "even sizes"],
)
def test_every_rank(rank, in_features, out, dtype, variant):
    table = make_table(in_features, [out, 3], [[rank, None], [None, rank]], dtype=dtype)
    batch = LoraBatch.from_runs([0, None, 1], [1, 1, 1])
    y, x = make_rows(table, batch, dtype, padding=3)
    device = on_device(table, dtype, pool_rows=512)
    got = updated(y, x, device, device_batch(batch, device, variant=variant))
    assert_like_reference(y, x, table, batch, got)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 129])
def test_every_row_count(rows, variant):
    table = make_table(33, [20], [[7]], dtype=torch.float16)
    batch = LoraBatch.from_runs([0], [rows])
    y, x = make_rows(table, batch, torch.float16)
    device = on_device(table, torch.float16)
    got = updated(y, x, device, device_batch(batch, device, variant=variant))
    assert_like_reference(y, x, table, batch, got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("in_features", [1, 576, 1031, 2305])
def test_every_size_and_split_of_the_inputs(in_features, variant, dtype):
    sizes = [1, 259, 130]
    table = make_table(in_features, sizes, [[2, 9, None], [None, 3, 8]], dtype=dtype)
    batch = LoraBatch.from_runs([1, 0], [2, 1])
    y, x = make_rows(table, batch, dtype)
    device = on_device(table, dtype)
    prepared = device_batch(batch, device, variant=variant)
    assert prepared.split_k(in_features) == -(-in_features // 1024)
    assert_like_reference(y, x, table, batch, updated(y, x, device, prepared))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shrunk_rows_keep_more_than_the_models_precision(variant):
    # Not in bfloat16, which the interpreter cuts where a GPU rounds.
    table = make_table(64, [48], [[64]], dtype=torch.float16)
    weights = table.weights(0)
    assert weights is not None
    batch = LoraBatch.from_runs([0], [1])
    y, x = make_rows(table, batch, torch.float16)
    exact = weights.b[0].double() @ (weights.a.double() @ x[0].double()) * weights.scalings[0]
    device = on_device(table, torch.float16)
    # The base's output is zero, so that the update's own rounding shows: half a unit at most.
    got = updated(torch.zeros_like(y), x, device, device_batch(batch, device, variant=variant))
    error = (got[0].double() - exact).abs() / exact.abs().clamp(min=2.0**-6)
    assert error.max() <= torch.finfo(torch.float16).eps / 2 * 1.02
