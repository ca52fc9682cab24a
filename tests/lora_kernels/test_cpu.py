from typing import Any

import pytest
import torch

from lora_kernels import CpuKernels, LoraBatch, add_lora, choose_cpu_kernels
from lora_kernels.cpu_kernels import CpuTable
from lora_kernels.native_library import load_native_library
from lora_kernels.reference import add_lora_reference
from tests.support.lora_cases import (
    POPULARITY,
    TOLERANCE,
    has_native_kernel,
    make_cpu_table,
    make_rows,
)

PATHS = ["torch"]
if has_native_kernel():
    PATHS += [f"native/{name}" for name in load_native_library().instruction_sets]
DTYPES = [torch.float32, torch.bfloat16]
RANKS = [1, 2, 3, 8, 12, 16, 24, 40, 64]


@pytest.fixture(params=PATHS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return choose_cpu_kernels(request.param)


def assert_matches(y: torch.Tensor, x: torch.Tensor, table: CpuTable, batch: LoraBatch) -> None:
    expected, got = y.clone(), y.clone()
    add_lora_reference(expected, x, table, batch)
    add_lora(got, x, table, batch)
    if y.numel():
        scale = max(expected.float().abs().max().item(), 1.0)
        difference = (got.float() - expected.float()).abs().max().item()
        assert difference <= TOLERANCE[y.dtype] * scale
    touched = torch.zeros(y.shape[0], dtype=torch.bool)
    touched[batch.permutation] = True
    assert torch.equal(got[~touched], y[~touched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("length", [1, 3, 5, 16])
def test_segments_match_the_reference(kernels, dtype, popularity, length):
    slots = POPULARITY[popularity]
    table = make_cpu_table(
        kernels, 48, [40, 16, 16], [[8, 8, 8], [4, None, 16], [None, None, 3]], dtype=dtype
    )
    batch = LoraBatch.from_runs(slots, [length + i % 2 for i in range(len(slots))])
    y, x = make_rows(table, batch, dtype)
    assert_matches(y, x, table, batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("in_features", "out"), [(37, 51), (1, 1), (64, 96)])
def test_every_rank_at_odd_sizes(kernels, dtype, rank, in_features, out):
    table = make_cpu_table(
        kernels, in_features, [out, 3], [[rank, None], [None, rank]], dtype=dtype
    )
    batch = LoraBatch.from_runs([0, None, 1, 0], [2, 1, 3, 1])
    y, x = make_rows(table, batch, dtype, padding=4)
    assert_matches(y, x, table, batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 129])
def test_every_row_count(kernels, dtype, rows):
    table = make_cpu_table(kernels, 33, [20, 7], [[8, 12]], dtype=dtype)
    batch = LoraBatch.from_runs([0], [rows])
    y, x = make_rows(table, batch, dtype, padding=-rows % 16)
    assert_matches(y, x, table, batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_ranks_and_widths_of_several_blocks_panels_and_chunks(kernels, dtype, threads):
    torch.set_num_threads(threads)
    ranks = [[70, 8, 3], [None, 256, 1], [16, 16, 16], [1, None, 47]]
    table = make_cpu_table(kernels, 576, [1100, 72, 64], ranks, dtype=dtype)
    for lengths in ([1, 0, 0, 2], [1, 1, 1, 1], [40, 3, 17, 1]):
        batch = LoraBatch.from_runs([3, 1, 0, 2], lengths)
        y, x = make_rows(table, batch, dtype, padding=3)
        assert_matches(y, x, table, batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_be_views_with_gaps_between_them(kernels, dtype):
    table = make_cpu_table(kernels, 40, [24, 8], [[8, 4], [3, 5]], dtype=dtype)
    batch = LoraBatch.from_runs([0, 1, 0], [2, 3, 4])
    y, x = make_rows(table, batch, dtype)
    expected = y.clone()
    add_lora(expected, x, table, batch)
    wide_y, wide_x = torch.zeros(9, 50, dtype=dtype), torch.zeros(9, 100, dtype=dtype)
    wide_y[:, 7:39], wide_x[:, ::2][:, :40] = y, x
    add_lora(wide_y[:, 7:39], wide_x[:, ::2][:, :40], table, batch)
    assert torch.equal(wide_y[:, 7:39], expected)
    assert not wide_y[:, :7].any() and not wide_y[:, 39:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_a_number_stays_in_its_row_and_its_slice(kernels, dtype):
    table = make_cpu_table(kernels, 20, [12, 12, 5], [[3, 5, 7], [1, 2, 3]], dtype=dtype)
    batch = LoraBatch.from_runs([0, 1], [3, 2])
    y, x = make_rows(table, batch, dtype)
    clean = y.clone()
    add_lora(clean, x, table, batch)
    weights: Any = table.weights(0)
    bad = [weights.slice(i) for i in range(3)]
    bad[1].a.fill_(float("nan"))
    install: Any = table.install
    install(0, kernels.fuse(bad, dtype))
    x[4] = float("nan")
    add_lora(y, x, table, batch)
    assert y[:3, 12:24].isnan().all() and y[4].isnan().all()
    assert torch.equal(y[:3, :12], clean[:3, :12]) and torch.equal(y[:3, 24:], clean[:3, 24:])
    assert torch.equal(y[3], clean[3])


@pytest.mark.parametrize("lengths", [[0, 3, 0], [0, 0, 0], [1, 0, 5]])
def test_adapters_without_rows_add_nothing(kernels, lengths):
    table = make_cpu_table(kernels, 16, [8], [[4], [2], [8]])
    batch = LoraBatch.from_runs([0, 1, 2], lengths)
    y, x = make_rows(table, batch, torch.float32)
    assert_matches(y, x, table, batch)


def test_an_empty_segment_between_full_ones_is_allowed(kernels):
    table = make_cpu_table(kernels, 16, [8], [[4], [2], [8]])
    batch = LoraBatch(
        num_rows=3,
        permutation=torch.tensor([2, 0, 1]),
        segment_indptr=(0, 1, 1, 3),
        segment_slot=(0, 1, 2),
        segment_start=(2, None, 0),
    )
    y, x = make_rows(table, batch, torch.float32)
    assert_matches(y, x, table, batch)


def test_rank_zero_adds_nothing(kernels):
    table = make_cpu_table(kernels, 16, [8, 4], [[0, 2]])
    batch = LoraBatch.from_runs([0], [3])
    y, x = make_rows(table, batch, torch.float32)
    got = y.clone()
    add_lora(got, x, table, batch)
    assert torch.equal(got[:, :8], y[:, :8])
    assert not torch.equal(got[:, 8:], y[:, 8:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[0], [0, 1, 0]], ids=["consecutive", "scattered"])
def test_unwritten_memory_never_reaches_the_output(kernels, dtype, slots, poisoned_empty):
    torch.empty(1)
    assert poisoned_empty  # the poison is on
    table = make_cpu_table(kernels, 24, [10, 6, 6], [[3, None, 8], [None, 2, None]], dtype=dtype)
    batch = LoraBatch.from_runs(slots, [3] * len(slots))
    y, x = make_rows(table, batch, dtype)
    add_lora(y, x, table, batch)
    assert y.isfinite().all()


def test_an_update_of_a_bfloat16_row_is_accumulated_in_float32(kernels):
    table = make_cpu_table(kernels, 256, [1], [[64]], dtype=torch.bfloat16)
    part = table.slice(0, 0)
    assert part is not None
    batch = LoraBatch.from_runs([0], [1])
    y, x = make_rows(table, batch, torch.bfloat16)
    exact = part.b.double() @ (part.a.double() @ x[0].double()) * part.scaling
    expected = (y[0].double() + exact).to(torch.bfloat16)
    add_lora(y, x, table, batch)
    assert torch.equal(y[0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_bit_equal_alone_and_in_any_crowd(kernels, dtype, threads):
    torch.set_num_threads(threads)
    table = make_cpu_table(kernels, 100, [60, 20], [[3, 9], [16, None], [None, 40]], dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    x0 = torch.randn(1, 100, generator=generator).to(dtype)
    y0 = torch.randn(1, 80, generator=generator).to(dtype)
    for slot in range(3):
        alone = y0.clone()
        add_lora(alone, x0, table, LoraBatch.from_runs([slot], [1]))
        for before, own, after in [(0, 1, 15), (3, 17, 1), (16, 5, 130), (1, 300, 0)]:
            batch = LoraBatch.from_runs([(slot + 1) % 3, slot, None, slot], [before, own, after, 2])
            y, x = make_rows(table, batch, dtype, padding=5)
            x[before + own // 2], y[before + own // 2] = x0[0], y0[0]
            add_lora(y, x, table, batch)
            assert torch.equal(y[before + own // 2], alone[0])


def test_a_reused_slot_never_shows_its_former_weights(kernels):
    full = make_cpu_table(kernels, 16, [8, 8], [[4, 4]]).weights(0)
    partial = make_cpu_table(kernels, 16, [8, 8], [[None, 2]], seed=3).weights(0)
    table: Any = kernels.make_table(16, [8, 8], 1, torch.float32)
    batch = LoraBatch.from_runs([0], [4])
    y, x = make_rows(table, batch, torch.float32)

    def run() -> torch.Tensor:
        out = y.clone()
        add_lora(out, x, table, batch)
        return out

    assert torch.equal(run(), y)
    table.install(0, partial)
    only_partial = run()
    table.install(0, full)
    assert not torch.equal(run()[:, :8], y[:, :8])
    table.install(0, partial)
    assert torch.equal(run(), only_partial)
    assert torch.equal(only_partial[:, :8], y[:, :8])
    table.install(0, None)
    assert torch.equal(run(), y)
    table.install(0, full)
    table.clear(0)
    assert torch.equal(run(), y)
