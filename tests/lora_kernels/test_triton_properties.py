"""What the kernels promise beyond values: isolated slots, no idle work, bits, wide addresses."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from lora_kernels import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_table import DeviceLoraTable
from lora_kernels.kernel_call import KernelCall
from lora_kernels.pool import pages_for
from lora_kernels.tiles import VARIANTS
from lora_kernels.triton_launch import plan
from tests.support.device_lora import (
    assert_like_reference,
    device_batch,
    on_device,
    poison_pool,
    updated,
)
from tests.support.lora_cases import make_rows, make_table

SIZES = [40, 16, 16]


def num_programs(call: KernelCall) -> int:
    programs = 1
    for size in call.grid:
        programs *= size
    return programs


def pages_of(table: DeviceLoraTable, slot: int) -> set[int]:
    """Pages of the A pool that hold a slot's ranks."""
    pages: set[int] = set()
    for record in table.slots[slot].tolist():
        pages.update(record[2 : 2 + pages_for(record[0])])
    return pages


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_reused_slot_and_reused_pages_never_show_their_former_owner(variant):
    former = make_table(32, SIZES, [[24, 16, 9]]).weights(0)
    table = make_table(32, SIZES, [[3, None, 17], [None, 12, None]], seed=5)
    batch = LoraBatch.from_runs([0, 1], [3, 2])
    y, x = make_rows(table, batch, torch.float32)
    fresh = on_device(table, torch.float32)
    expected = updated(y, x, fresh, device_batch(batch, fresh, variant=variant))
    assert_like_reference(y, x, table, batch, expected)

    reused = DeviceLoraTable.create(
        32, SIZES, 2, max_rank=24, pool_rows=32, dtype=torch.float32, device="cpu"
    )
    reused.install(0, former)
    former_pages = pages_of(reused, 0)
    reused.clear(0)
    for pool in (reused.a_pool, *reused.b_pools):
        poison_pool(pool)  # as if the former owner's weights were not numbers
    for slot in range(2):
        reused.install(slot, table.weights(slot))
    assert pages_of(reused, 0) & former_pages  # or nothing was reused and nothing is shown
    got = updated(y, x, reused, device_batch(batch, reused, variant=variant))
    assert torch.equal(got, expected)

    reused.install(0, None)
    got = updated(y, x, reused, device_batch(batch, reused, variant=variant))
    assert torch.equal(got[:3], y[:3])
    assert torch.equal(got[3:], expected[3:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_static_batch_gives_the_bits_of_one_that_fits(variant):
    table = make_table(48, SIZES, [[8, 3, None], [None, 20, 1], [32, 32, 32]])
    batch = LoraBatch.from_runs([1, None, 0], [3, 2, 2])
    y, x = make_rows(table, batch, torch.float32)
    device = on_device(table, torch.float32)
    tight = updated(y, x, device, device_batch(batch, device, variant=variant))
    spare = device_batch(batch, device, variant=variant, spare_rows=9)
    assert torch.equal(updated(y, x, device, spare), tight)
    # The same buffers, as a replayed graph meets them a step later: fewer rows, then none.
    for later in (LoraBatch.from_runs([2], [1]), LoraBatch.from_runs([None], [4])):
        spare.update(later)
        y, x = make_rows(table, later, torch.float32)
        assert_like_reference(y, x, table, later, updated(y, x, device, spare))


def test_no_program_runs_for_slots_without_rows_or_ranks_that_no_row_has():
    table = make_table(64, [48, 20], [[8, 8], [4, None], [64, 64]])
    device = on_device(table, torch.float32)
    batch = LoraBatch.from_runs([0, None, 1], [3, 5, 1])
    y, x = make_rows(table, batch, torch.float32)
    prepared = device_batch(batch, device, batch_invariant=True)
    shrink, expand = plan(y, x, device, prepared)
    # Two segments of one tile each; one rank tile, for the rank-64 adapter has no rows.
    assert (shrink.grid, expand.grid) == ((2, 1, 2), (2, 2))
    prepared.update(LoraBatch.from_runs([2], [1]))
    shrink, expand = plan(y, x, device, prepared)
    assert (shrink.grid, expand.grid) == ((1, 4, 2), (1, 2))


@pytest.mark.parametrize(
    "batch",
    [
        LoraBatch.from_runs([], []),
        LoraBatch.from_runs([None], [4]),
        LoraBatch.from_runs([0, 1], [0, 0]),
        LoraBatch.from_runs([1], [4]),
    ],
    ids=["no rows", "base rows", "empty segments", "a slot without weights"],
)
def test_nothing_is_launched_where_there_is_nothing_to_do(batch):
    table = make_table(16, [8], [[4], [None]])
    device = on_device(table, torch.float32)
    y, x = make_rows(table, batch, torch.float32)
    assert plan(y, x, device, device_batch(batch, device)) == []
    assert torch.equal(updated(y, x, device, device_batch(batch, device)), y)


def test_work_follows_the_true_rank():
    """Programs of a rank-8 and a rank-128 adapter together are those of both alone."""
    table = make_table(64, [48], [[8], [128]])
    device = on_device(table, torch.float32)

    def programs(batch: LoraBatch) -> int:
        y, x = make_rows(table, batch, torch.float32)
        prepared = device_batch(batch, device, batch_invariant=True)
        shrink, expand = plan(y, x, device, prepared)
        live = 0
        for slot, _, _ in prepared.tile_map[: prepared.num_tiles].tolist():
            rank = int(device.slots[slot, 0, 0])
            live += -(-rank // prepared.tiles.shrink.ranks)
        assert live <= num_programs(shrink)
        return live + num_programs(expand)

    small, large = LoraBatch.from_runs([0], [31]), LoraBatch.from_runs([1], [1])
    both = LoraBatch.from_runs([0, 1], [31, 1])
    assert programs(both) == programs(small) + programs(large)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_is_bit_equal_alone_and_in_any_crowd(dtype):
    table = make_table(100, [60, 20], [[3, 9], [16, None], [None, 40]], dtype=dtype)
    device = on_device(table, dtype)
    generator = torch.Generator().manual_seed(7)
    x0 = torch.randn(1, 100, generator=generator).to(dtype)
    y0 = torch.randn(1, 80, generator=generator).to(dtype)

    def run(batch: LoraBatch, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return updated(y, x, device, device_batch(batch, device, batch_invariant=True))

    for slot in range(3):
        alone = run(LoraBatch.from_runs([slot], [1]), y0, x0)
        for before, own, after in [(0, 1, 2), (3, 18, 1), (1, 40, 0)]:
            batch = LoraBatch.from_runs([(slot + 1) % 3, slot, None, slot], [before, own, after, 2])
            y, x = make_rows(table, batch, dtype)
            row = before + own // 2
            x[row], y[row] = x0[0], y0[0]
            assert torch.equal(run(batch, y, x)[row], alone[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_batch_gives_the_same_bits(variant):
    table = make_table(2100, [24], [[9], [16]])
    batch = LoraBatch.from_runs([0, 1], [2, 3])
    y, x = make_rows(table, batch, torch.float32)
    device = on_device(table, torch.float32)
    runs = [updated(y, x, device, device_batch(batch, device, variant=variant)) for _ in range(2)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("operand", ["x", "y", "a", "b"])
def test_addresses_past_2_to_the_31_elements(operand, variant):
    """Rows so far apart that 32 bits do not count to them; memory between is never touched."""
    table = make_table(16, [16], [[20]], dtype=torch.float16)
    batch = LoraBatch.from_runs([0], [3])
    y, x = make_rows(table, batch, torch.float16)
    device = on_device(table, torch.float16, pool_rows=24)
    if operand == "x":
        x = far_apart(x, rows_apart=1)
    elif operand == "y":
        y = far_apart(y, rows_apart=1)
    else:
        pool = device.a_pool if operand == "a" else device.b_pools[0]
        pool.rows = far_apart(pool.rows, rows_apart=8)
    prepared = device_batch(batch, device, variant=variant)
    expected_y, got = y.clone(), y
    for call in plan(got, x, device, prepared):
        call.run()
    assert_like_reference(expected_y, x, table, batch, got)


def far_apart(values: torch.Tensor, *, rows_apart: int) -> torch.Tensor:
    """The same values with row `2 * rows_apart` beyond 2**31 elements."""
    stride = 2**30 // rows_apart + 16
    rows, columns = values.shape
    storage = torch.empty(stride * (rows - 1) + columns, dtype=values.dtype)
    spread = storage.as_strided((rows, columns), (stride, 1))
    spread.copy_(values)
    return spread


def test_rows_are_read_through_the_permutation_alone():
    """Entries in an order that no run would give, with rows left out."""
    table = make_table(32, [24], [[5], [11]])
    batch = LoraBatch(
        num_rows=6,
        permutation=torch.tensor([5, 0, 2, 3]),
        segment_indptr=(0, 1, 1, 4),
        segment_slot=(1, 3, 0),
        segment_start=(None, None, None),
    )
    table_of_four = make_table(32, [24], [[5], [11], [None], [7]])
    y, x = make_rows(table, batch, torch.float32)
    device = on_device(table_of_four, torch.float32)
    for variant in VARIANTS:
        got = updated(y, x, device, device_batch(batch, device, variant=variant))
        assert_like_reference(y, x, table_of_four, batch, got)


def test_nothing_before_a_launch_reads_the_device(monkeypatch: pytest.MonkeyPatch):
    """A capture would end at the first read."""
    table = make_table(16, [8], [[4]])
    device = on_device(table, torch.float32)
    batch = LoraBatch.from_runs([0], [2])
    y, x = make_rows(table, batch, torch.float32)
    prepared: DeviceLoraBatch = device_batch(batch, device)

    def refuse(name: str) -> Callable[..., None]:
        def read(*_: object, **__: object) -> None:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return read

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse(name))
    calls = plan(y, x, device, prepared)
    assert len(calls) == 2
    assert all(first.kernel is not second.kernel for first, second in pairwise(calls))
