import pytest
import torch

from lora_kernels import LoraSlice
from lora_kernels.device_table import DeviceLoraTable
from lora_kernels.errors import PoolExhausted
from lora_kernels.pool import PAGE_ROWS, RankRowPool
from tests.support.lora_cases import make_table

SIZES = (24, 10, 10)


def make_device_table(**overrides: int) -> DeviceLoraTable:
    limits = {"max_rank": 32, "pool_rows": 96} | overrides
    return DeviceLoraTable.create(20, SIZES, 3, **limits, dtype=torch.float32, device="cpu")


def weights_of(*ranks: int | None, seed: int = 0):
    return make_table(20, SIZES, [ranks], seed=seed).weights(0)


def free_pages(table: DeviceLoraTable) -> list[int]:
    return [pool.num_free_pages for pool in (table.a_pool, *table.b_pools)]


def read_back(table: DeviceLoraTable, slot: int, index: int) -> LoraSlice | None:
    """A slice as a kernel finds it."""
    record = table.slots[slot, index]
    rank = int(record[0])
    if rank == 0:
        return None
    ranks = torch.arange(rank)

    def rows(pool: RankRowPool, pages: torch.Tensor) -> torch.Tensor:
        numbers = pages.long()[ranks // PAGE_ROWS] * PAGE_ROWS + ranks % PAGE_ROWS
        return pool.rows[numbers, : pool.row_size]

    a_pages, b_pages = record[2:].split(table.max_pages)
    return LoraSlice(
        rows(table.a_pool, a_pages),
        rows(table.b_pools[index], b_pages).T,
        float(record[1:2].view(torch.float32)),
    )


def assert_holds(table: DeviceLoraTable, slot: int, weights) -> None:
    for index in range(table.num_slices):
        expected = weights.slice(index) if weights is not None else None
        found = read_back(table, slot, index)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert torch.equal(found.a, expected.a)
            assert torch.equal(found.b, expected.b)
            assert found.scaling == pytest.approx(expected.scaling)


def test_each_slot_holds_its_own_weights_whatever_came_before():
    table = make_device_table()
    first, second, third = weights_of(9, None, 3), weights_of(None, 32, 1), weights_of(8, 8, 8)
    table.install(0, first)
    table.install(1, second)
    table.clear(0)
    table.install(2, third)
    table.install(0, second)
    assert_holds(table, 0, second)
    assert_holds(table, 1, second)
    assert_holds(table, 2, third)
    table.install(1, None)
    assert_holds(table, 1, None)
    table.install(0, third)
    assert_holds(table, 0, third)


def test_an_adapter_takes_pages_by_its_true_ranks_and_gives_them_all_back():
    table = make_device_table()
    empty = free_pages(table)
    table.install(0, weights_of(9, None, 3))
    assert free_pages(table) == [empty[0] - 3, empty[1] - 2, empty[2], empty[3] - 1]
    table.install(0, weights_of(None, 8, None))
    assert free_pages(table) == [empty[0] - 1, empty[1], empty[2] - 1, empty[3]]
    table.clear(0)
    assert free_pages(table) == empty
    table.a_pool.check_integrity()


def test_only_the_slots_asked_about_decide_the_largest_rank():
    table = make_device_table()
    table.install(0, weights_of(4, None, 3))
    table.install(1, weights_of(1, 32, 1))
    assert table.largest_rank([0, 2]) == 4
    assert table.largest_rank([0, 1]) == 32
    table.clear(1)
    assert table.largest_rank([0, 1]) == 4
    assert table.largest_rank([]) == 0


@pytest.mark.parametrize("short", ["A", "B"])
def test_an_adapter_that_does_not_fit_changes_nothing(short):
    pool_rows = {"A": 64, "B": 16}[short]
    b_pools = [RankRowPool(size, pool_rows, dtype=torch.float32, device="cpu") for size in SIZES]
    a_pool = RankRowPool(20, 24 if short == "A" else 200, dtype=torch.float32, device="cpu")
    table = DeviceLoraTable(20, SIZES, 3, 32, a_pool, b_pools)
    held = weights_of(8, 8, 8)
    table.install(0, held)
    before, free = table.slots.clone(), free_pages(table)
    with pytest.raises(PoolExhausted):
        table.install(1, weights_of(16, 16, 16, seed=5))
    with pytest.raises(PoolExhausted):
        table.install(0, weights_of(24, 24, 24, seed=5))
    assert torch.equal(table.slots, before)
    assert free_pages(table) == free
    assert_holds(table, 0, held)


def test_a_full_slot_makes_room_for_its_own_successor():
    table = make_device_table(pool_rows=16)
    table.install(0, weights_of(16, 16, 16))
    successor = weights_of(16, 16, 16, seed=9)
    table.install(0, successor)
    assert_holds(table, 0, successor)


def test_slices_of_one_a_share_its_pages():
    table = make_device_table()
    a = torch.randn(12, 20)
    slices = [LoraSlice(a, torch.randn(size, 12), 0.5) for size in SIZES]
    free = table.a_pool.num_free_pages
    table.install_slices(1, slices)
    assert table.a_pool.num_free_pages == free - 2
    for index, part in enumerate(slices):
        found = read_back(table, 1, index)
        assert found is not None and torch.equal(found.a, a) and torch.equal(found.b, part.b)
    table.clear(1)
    assert table.a_pool.num_free_pages == free


def test_tables_may_share_a_pool():
    pool = RankRowPool(20, 64, dtype=torch.float32, device="cpu")
    tables = [
        DeviceLoraTable(20, [20], 2, 32, pool, [pool]),
        DeviceLoraTable(20, [20], 2, 32, pool, [pool]),
    ]
    weights = [make_table(20, [20], [[9]], seed=seed).weights(0) for seed in range(2)]
    for table, part in zip(tables, weights, strict=True):
        table.install(1, part)
    assert pool.num_free_pages == 0
    for table, part in zip(tables, weights, strict=True):
        assert_holds(table, 1, part)
    with pytest.raises(PoolExhausted):
        tables[0].install(0, weights[0])


def test_tensors_stay_where_a_captured_graph_expects_them():
    table = make_device_table()
    addresses = [t.data_ptr() for t in (table.slots, table.slice_offsets, table.a_pool.rows)]
    table.install(0, weights_of(9, 1, 3))
    table.install(0, weights_of(4, 5, 6))
    table.clear(0)
    assert addresses == [
        t.data_ptr() for t in (table.slots, table.slice_offsets, table.a_pool.rows)
    ]


def test_rank_zero_takes_nothing():
    table = make_device_table()
    free = free_pages(table)
    table.install(0, weights_of(0, None, 0))
    assert free_pages(table) == free
    assert table.largest_rank([0]) == 0


@pytest.mark.parametrize(
    ("in_features", "sizes", "rank", "message"),
    [
        (21, SIZES, 4, "slice 0: A is"),
        (20, (24, 11, 10), 4, "slice 1: B is"),
        (20, (24, 10), 4, "weights for 2 slices"),
        (20, SIZES, 33, "rank 33 is over the limit of 32"),
    ],
)
def test_weights_that_do_not_fit_are_refused(in_features, sizes, rank, message):
    table = make_device_table()
    weights = make_table(in_features, sizes, [[rank] * len(sizes)]).weights(0)
    with pytest.raises(ValueError, match=message):
        table.install(0, weights)
    assert not table.slots.any()


@pytest.mark.parametrize(
    ("in_features", "sizes", "max_rank", "message"),
    [
        (20, (8, 8, 8, 8), 32, "slices 4"),
        (20, (8,), 257, "max_rank 257"),
        (20, (8, 8), 32, "B pools 1"),
        (21, (8,), 32, "A rows of 20"),
        (20, (9,), 32, "B rows of 8"),
    ],
)
def test_pools_that_do_not_fit_are_refused(in_features, sizes, max_rank, message):
    a_pool = RankRowPool(20, 8, dtype=torch.float32, device="cpu")
    b_pool = RankRowPool(8, 8, dtype=torch.float32, device="cpu")
    b_pools = [b_pool] * (4 if len(sizes) == 4 else 1)
    with pytest.raises(ValueError, match=message):
        DeviceLoraTable(in_features, sizes, 1, max_rank, a_pool, b_pools)


def test_pools_of_two_dtypes_are_refused():
    a_pool = RankRowPool(20, 8, dtype=torch.float32, device="cpu")
    b_pool = RankRowPool(8, 8, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match="bfloat16"):
        DeviceLoraTable(20, [8], 1, 8, a_pool, [b_pool])
