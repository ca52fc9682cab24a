"""Device memory for rank rows, handed out in pages so that nothing fragments."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lora_kernels.errors import PoolExhausted

PAGE_ROWS = 8
"""Rank rows of a page; an adapter wastes at most 7 of them."""
ROW_ALIGNMENT = 16
"""Rows are padded to a multiple of this many elements, so that each starts on 16 bytes."""


def pages_for(rank: int) -> int:
    """Pages that hold `rank` rows."""
    return -(-rank // PAGE_ROWS)


class RankRowPool:
    """Rows of one length: rows of A (length: inputs) or columns of B (length: outputs).

    Several tables may share a pool whose rows have their length. Pages are not cleared when they
    change hands: a kernel reads only the rows below the rank of the slot that owns the page.
    """

    def __init__(
        self, row_size: int, num_rows: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        num_pages = num_rows // PAGE_ROWS
        if row_size < 1 or num_pages < 1:
            raise ValueError(f"a pool of {num_rows} rows of {row_size}: less than one page")
        self.row_size = row_size
        self.num_pages = num_pages
        self.rows = torch.empty(
            num_pages * PAGE_ROWS, _round_up(row_size, ROW_ALIGNMENT), dtype=dtype, device=device
        )
        """[rows, row_size rounded up]: row r of page p is row ``p * PAGE_ROWS + r``."""
        # Kernels read the padding of rows. It is cleared here only, since nothing ever writes it.
        self.rows[:, row_size:] = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...]:
        """Take pages, lowest first in a fresh pool; raises PoolExhausted and then takes none."""
        if num_pages > len(self._free):
            raise PoolExhausted(self.row_size, num_pages * PAGE_ROWS, len(self._free) * PAGE_ROWS)
        pages = tuple(self._free.pop() for _ in range(num_pages))
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; raises ValueError for a page that is free or listed twice."""
        if len(set(pages)) != len(pages) or any(self._is_free[page] for page in pages):
            raise ValueError(f"pages {list(pages)} are not all in use, or not distinct")
        for page in pages:
            self._is_free[page] = True
        self._free.extend(reversed(pages))

    def write(self, pages: Sequence[int], values: Tensor) -> None:
        """Copy values [rank, row_size], on any device and of any dtype, to the pages' first rows.

        The copies are queued on the current stream: one for each run of adjacent pages.
        """
        for begin, end in _runs(pages[: pages_for(values.shape[0])]):
            part = values[begin * PAGE_ROWS : end * PAGE_ROWS]
            first = pages[begin] * PAGE_ROWS
            target = self.rows[first : first + part.shape[0], : self.row_size]
            target.copy_(part, non_blocking=True)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list and the flags agree."""
        assert len(set(self._free)) == len(self._free)
        assert sorted(self._free) == [p for p, free in enumerate(self._is_free) if free]


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each stretch of pages that follow one another in memory."""
    ends = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
    bounds = [0, *ends, len(pages)]
    return [(begin, end) for begin, end in pairwise(bounds) if end > begin]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
