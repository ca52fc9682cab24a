import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_kernels.errors import PoolExhausted
from lora_kernels.pool import PAGE_ROWS, RankRowPool, pages_for


def make_pool(num_pages: int = 6, row_size: int = 5) -> RankRowPool:
    return RankRowPool(row_size, num_pages * PAGE_ROWS, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(("rank", "pages"), [(0, 0), (1, 1), (8, 1), (9, 2), (256, 32)])
def test_a_rank_takes_as_many_pages_as_it_needs(rank, pages):
    assert pages_for(rank) == pages


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_pages_have_one_owner_and_all_come_back(steps):
    pool = make_pool()
    owned: list[tuple[int, ...]] = []
    for takes, number in steps:
        if takes:
            free = pool.num_free_pages
            if number > free:
                with pytest.raises(PoolExhausted):
                    pool.allocate(number)
                assert pool.num_free_pages == free
            else:
                owned.append(pool.allocate(number))
        elif owned:
            pool.free(owned.pop(number % len(owned)))
        pages = [page for part in owned for page in part]
        assert len(set(pages)) == len(pages)
        assert pool.num_free_pages == pool.num_pages - len(pages)
        pool.check_integrity()


def test_an_exhausted_pool_says_what_it_lacks():
    pool = make_pool(num_pages=2)
    pool.allocate(1)
    with pytest.raises(PoolExhausted, match="16 rank rows of 5 are wanted, 8 are free"):
        pool.allocate(2)


@pytest.mark.parametrize("pages", [[0], [1, 1], [1, 0]])
def test_a_page_that_is_free_or_named_twice_is_not_freed(pages):
    pool = make_pool()
    assert pool.allocate(2) == (0, 1)
    pool.free([0])
    with pytest.raises(ValueError, match="pages"):
        pool.free(pages)
    assert pool.num_free_pages == pool.num_pages - 1


def test_rows_are_written_to_their_pages_and_nowhere_else():
    pool = make_pool()
    pool.rows.fill_(-1.0)
    values = torch.randn(11, 5)
    pool.write((4, 1), values)
    expected = torch.full_like(pool.rows, -1.0)
    expected[4 * PAGE_ROWS : 5 * PAGE_ROWS, :5] = values[:8]
    expected[1 * PAGE_ROWS : 1 * PAGE_ROWS + 3, :5] = values[8:]
    assert torch.equal(pool.rows, expected)


def test_rows_start_on_whole_vectors_and_their_padding_is_zero(poisoned_empty):
    pool = make_pool(row_size=17)
    assert poisoned_empty
    assert pool.rows.shape == (6 * PAGE_ROWS, 32)
    assert pool.rows[:, :17].isnan().all()
    assert not pool.rows[:, 17:].any()


@pytest.mark.parametrize(("row_size", "num_rows"), [(0, 8), (4, 7)])
def test_a_pool_of_less_than_a_page_is_refused(row_size, num_rows):
    with pytest.raises(ValueError, match="less than one page"):
        RankRowPool(row_size, num_rows, dtype=torch.float32, device="cpu")
