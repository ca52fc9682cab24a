"""What the adapter slots hold for one projection, in device memory by true rank."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lora_kernels.errors import PoolExhausted
from lora_kernels.pool import PAGE_ROWS, RankRowPool, pages_for
from lora_kernels.table import SlotWeights
from lora_kernels.weights import LoraSlice

MAX_SLICES = 3
"""Slices of a projection (q, k, v): the kernels take one B pool for each."""
MAX_RANK = 256


class DeviceLoraTable:
    """The slots of one projection; `LoraTable` for devices, read by the Triton kernels.

    A slot's record in `slots` says, for each slice, its rank, its scaling, and the pages of its
    rows: [rank, scaling's bits, A pages (max_pages), B pages (max_pages)]. A slice without weights
    has rank 0. Tensors keep their addresses, so that a captured CUDA graph sees later installs.

    Installs are queued on the current stream. To install on another stream than that of the
    kernels, make it wait for their last launch first, because pages change hands; and make later
    launches that use the slot wait for the install.
    """

    def __init__(
        self,
        in_features: int,
        slice_sizes: Sequence[int],
        num_slots: int,
        max_rank: int,
        a_pool: RankRowPool,
        b_pools: Sequence[RankRowPool],
    ) -> None:
        """`a_pool` has rows of `in_features`, `b_pools[i]` rows of `slice_sizes[i]`."""
        self.in_features = in_features
        self.slice_sizes = tuple(slice_sizes)
        self.slice_indptr = (0, *accumulate(slice_sizes))
        """Columns `slice_indptr[i]:slice_indptr[i + 1]` of the output belong to slice i."""
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.a_pool = a_pool
        self.b_pools = tuple(b_pools)
        self._check_pools()
        self.device, self.dtype = a_pool.rows.device, a_pool.rows.dtype
        self.max_pages = pages_for(max_rank)
        self._record_size = 2 + 2 * self.max_pages
        shape = (num_slots, self.num_slices, self._record_size)
        self.slots = torch.zeros(shape, dtype=torch.int32, device=self.device)
        """[num_slots, num_slices, 2 + 2 * max_pages] int32."""
        self.slice_offsets = torch.tensor(self.slice_indptr, dtype=torch.int32, device=self.device)
        """[num_slices + 1] int32: `slice_indptr` for the kernels."""
        self._largest_ranks = [0] * num_slots
        self._owned: list[list[tuple[RankRowPool, tuple[int, ...]]]] = [
            [] for _ in range(num_slots)
        ]

    @staticmethod
    def create(
        in_features: int,
        slice_sizes: Sequence[int],
        num_slots: int,
        *,
        max_rank: int,
        pool_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "DeviceLoraTable":
        """Make a table with pools of its own: `pool_rows` rank rows for each slice."""

        def pool(row_size: int, num_rows: int) -> RankRowPool:
            return RankRowPool(row_size, num_rows, dtype=dtype, device=device)

        a_pool = pool(in_features, pool_rows * len(slice_sizes))
        b_pools = [pool(size, pool_rows) for size in slice_sizes]
        return DeviceLoraTable(in_features, slice_sizes, num_slots, max_rank, a_pool, b_pools)

    @property
    def num_slices(self) -> int:
        """Linears of the checkpoint that the projection fuses."""
        return len(self.slice_sizes)

    @property
    def out_features(self) -> int:
        """Columns of the projection's output, all slices together."""
        return self.slice_indptr[-1]

    def largest_rank(self, slots: Sequence[int]) -> int:
        """The largest rank, over all slices, that these slots hold."""
        return max((self._largest_ranks[slot] for slot in slots), default=0)

    def install(self, slot: int, weights: SlotWeights | None) -> None:
        """Copy weights into pages; None where the adapter leaves this projection alone.

        Raises ValueError where the weights do not fit the projection, PoolExhausted where there is
        no room even with the slot's own pages back; the slot is then unchanged.
        """
        if weights is None:
            self.clear(slot)
        else:
            self.install_slices(slot, [weights.slice(i) for i in range(len(weights.slice_sizes))])

    def install_slices(self, slot: int, slices: Sequence[LoraSlice | None]) -> None:
        """Like `install`; slices that share the tensor `a` share its pages."""
        self._check(slices)
        self._check_room(slot, slices)
        self.clear(slot)
        record = np.zeros((self.num_slices, self._record_size), dtype=np.int32)
        shared: dict[tuple[int, int], tuple[int, ...]] = {}
        for index, part in enumerate(slices):
            if part is None or part.rank == 0:
                continue
            key = _identity(part)
            if key not in shared:
                shared[key] = self._place(slot, self.a_pool, part.a)
            a_pages = shared[key]
            b_pages = self._place(slot, self.b_pools[index], part.b.T)
            record[index, 0] = part.rank
            record[index, 1] = np.float32(part.scaling).view(np.int32)
            record[index, 2 : 2 + len(a_pages)] = a_pages
            start = 2 + self.max_pages
            record[index, start : start + len(b_pages)] = b_pages
        self._write_record(slot, torch.from_numpy(record))
        self._largest_ranks[slot] = max((p.rank for p in slices if p is not None), default=0)

    def clear(self, slot: int) -> None:
        """Forget a slot's weights and give its pages back."""
        for pool, pages in self._owned[slot]:
            pool.free(pages)
        self._owned[slot] = []
        self._largest_ranks[slot] = 0
        self.slots[slot].zero_()

    def _place(self, slot: int, pool: RankRowPool, values: Tensor) -> tuple[int, ...]:
        pages = pool.allocate(pages_for(values.shape[0]))
        self._owned[slot].append((pool, pages))
        pool.write(pages, values)
        return pages

    def _write_record(self, slot: int, record: Tensor) -> None:
        if self.device.type == "cuda":
            # From pageable memory the copy would wait for the stream.
            record = record.pin_memory()
        self.slots[slot].copy_(record, non_blocking=True)

    def _check_room(self, slot: int, slices: Sequence[LoraSlice | None]) -> None:
        present = [(i, part) for i, part in enumerate(slices) if part is not None]
        a_ranks = {_identity(part): part.rank for _, part in present}
        wanted = [(self.a_pool, sum(pages_for(rank) for rank in a_ranks.values()))]
        wanted += [(self.b_pools[index], pages_for(part.rank)) for index, part in present]
        for pool in (self.a_pool, *self.b_pools):
            num_pages = sum(pages for other, pages in wanted if other is pool)
            own = sum(len(pages) for other, pages in self._owned[slot] if other is pool)
            if num_pages > pool.num_free_pages + own:
                free = pool.num_free_pages + own
                raise PoolExhausted(pool.row_size, num_pages * PAGE_ROWS, free * PAGE_ROWS)

    def _check(self, slices: Sequence[LoraSlice | None]) -> None:
        if len(slices) != self.num_slices:
            raise ValueError(
                f"weights for {len(slices)} slices, the projection has {self.num_slices}"
            )
        for index, part in enumerate(slices):
            if part is None:
                continue
            expected_a = (part.rank, self.in_features)
            expected_b = (self.slice_sizes[index], part.rank)
            _expect(index, "A", part.a, expected_a)
            _expect(index, "B", part.b, expected_b)
            if part.rank > self.max_rank:
                raise ValueError(
                    f"slice {index}: rank {part.rank} is over the limit of {self.max_rank}"
                )

    def _check_pools(self) -> None:
        _require(1 <= len(self.slice_sizes) <= MAX_SLICES, "slices", len(self.slice_sizes))
        _require(1 <= self.max_rank <= MAX_RANK, "max_rank", self.max_rank)
        _require(len(self.b_pools) == len(self.slice_sizes), "B pools", len(self.b_pools))
        _require(self.a_pool.row_size == self.in_features, "A rows of", self.a_pool.row_size)
        for pool, size in zip(self.b_pools, self.slice_sizes, strict=True):
            _require(pool.row_size == size, "B rows of", pool.row_size)
            _require(pool.rows.dtype == self.a_pool.rows.dtype, "a B pool in", pool.rows.dtype)
            _require(pool.rows.device == self.a_pool.rows.device, "B on", pool.rows.device)


def _identity(part: LoraSlice) -> tuple[int, int]:
    return part.a.data_ptr(), part.rank


def _expect(index: int, name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"slice {index}: {name} is {list(tensor.shape)}, not {list(shape)}")


def _require(condition: bool, name: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} {value} does not fit the projection")
