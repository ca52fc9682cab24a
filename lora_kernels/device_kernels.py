"""Adapters for devices: weights in pinned host memory, and tables by true rank on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_kernels.cpu_kernels import CpuKernels, CpuTable, CpuWeights
from lora_kernels.device_table import DeviceLoraTable
from lora_kernels.pool import PAGE_ROWS, ROW_ALIGNMENT, pages_for
from lora_kernels.weights import LoraSlice, check_shapes

Pin = Callable[[Tensor], Tensor]
"""A tensor -> the same, contiguous, in memory that a device copies from while the host goes on."""


@dataclass(frozen=True, slots=True)
class PinnedWeights:
    """One adapter's weights for one projection, in one pinned buffer.

    In the layout of the pool's pages: the model's dtype, with B transposed.
    """

    in_features: int
    slice_sizes: tuple[int | None, ...]
    """Outputs of each slice; None where the adapter has no weights."""
    parts: tuple[LoraSlice | None, ...]
    """Views of the buffer. `b.T` is contiguous, as `a` is."""
    nbytes: int
    """Bytes of host memory; PyTorch allocates pinned memory in powers of two."""

    @staticmethod
    def pack(slices: Sequence[LoraSlice | None], dtype: torch.dtype, pin: Pin) -> "PinnedWeights":
        """Lay out slices, of which at least one is present; values are rounded to `dtype`.

        Raises ValueError where shapes do not agree.
        """
        in_features = check_shapes(slices)
        present = [part for part in slices if part is not None]
        flat = [values.reshape(-1) for part in present for values in (part.a, part.b.T)]
        buffer = pin(torch.cat([values.to(dtype) for values in flat]))
        parts: list[LoraSlice | None] = []
        first = 0
        for part in slices:
            if part is None:
                parts.append(None)
                continue
            rank, out = part.rank, part.b.shape[0]
            middle, end = first + rank * in_features, first + rank * (in_features + out)
            a = buffer[first:middle].view(rank, in_features)
            b = buffer[middle:end].view(rank, out).T
            parts.append(LoraSlice(a, b, part.scaling))
            first = end
        sizes = tuple(None if part is None else part.b.shape[0] for part in slices)
        nbytes = buffer.nbytes
        if buffer.is_pinned():
            nbytes = 1 << (nbytes - 1).bit_length()
        return PinnedWeights(in_features, sizes, tuple(parts), nbytes)

    def slice(self, index: int) -> LoraSlice | None:
        """The weights of one slice."""
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """Like `CpuKernels`, for a device."""

    name: str
    make_table: Callable[[int, Sequence[int], int, torch.dtype], DeviceLoraTable]
    """(in_features, slice_sizes, num_slots, dtype) -> a table of empty slots."""
    fuse: Callable[[Sequence[LoraSlice | None], torch.dtype], PinnedWeights]
    """As `CpuKernels.fuse`. Safe on any thread."""
    fallback_reason: str | None = None


Kernels = CpuKernels | DeviceKernels
Table = CpuTable | DeviceLoraTable
Weights = CpuWeights | PinnedWeights


def device_kernels(
    device: torch.device, *, max_rank: int, pool_rows: int, pin: Pin
) -> DeviceKernels:
    """Tables with pools of `pool_rows` rank rows for each slice of each projection."""

    def make_table(
        in_features: int, slice_sizes: Sequence[int], num_slots: int, dtype: torch.dtype
    ) -> DeviceLoraTable:
        return DeviceLoraTable.create(
            in_features,
            slice_sizes,
            num_slots,
            max_rank=max_rank,
            pool_rows=pool_rows,
            dtype=dtype,
            device=device,
        )

    def fuse(slices: Sequence[LoraSlice | None], dtype: torch.dtype) -> PinnedWeights:
        return PinnedWeights.pack(slices, dtype, pin)

    return DeviceKernels("triton", make_table, fuse)


def rank_rows(num_slots: int, max_rank: int) -> int:
    """Rank rows of a pool that always has room: for every slot at the highest rank."""
    return max(num_slots, 1) * pages_for(max_rank) * PAGE_ROWS


def row_bytes(in_features: int, slice_sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that one rank row of every slice takes in a projection's pools, A and B."""
    elements = len(slice_sizes) * _aligned(in_features) + sum(map(_aligned, slice_sizes))
    return elements * dtype.itemsize


def _aligned(row_size: int) -> int:
    return -(-row_size // ROW_ALIGNMENT) * ROW_ALIGNMENT
