"""One adapter's weights for one projection, in the order in which the compiled kernel reads them.

The slices' A are stacked by true rank, then cut into blocks of up to 48 ranks, each
[in_features, ranks]. Each slice's B is cut into panels of 64 columns, each [ranks, columns]. In
bfloat16, two neighbours along the summed axis (inputs of A, ranks of B) share a 32-bit word.
Everything is in one buffer, which a decode reads once from front to back: A, scalings, and the B of
each slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lora_kernels.weights import LoraSlice, check_shapes

BLOCK_RANKS, PAD_RANKS = 48, 8
PANEL_COLUMNS, PAD_COLUMNS = 64, 16
"""As in native/add_lora.cpp."""
ALIGNMENT = 64
OVERREAD_BYTES = 64
"""A vector may reach past the last block's last rank."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`LoraWeights` for the compiled kernel, in the model's dtype; made by `pack`."""

    in_features: int
    slice_sizes: tuple[int | None, ...]
    """Outputs of each slice; None where the adapter has no weights."""
    rank_indptr: tuple[int, ...]
    """Stacked ranks `rank_indptr[i]:rank_indptr[i + 1]` belong to slice i."""
    scalings: tuple[float, ...]
    dtype: torch.dtype
    data: Tensor
    """All of it, uint8."""
    offsets: tuple[int, ...]
    """Bytes in `data`: of A, of the scalings, of B of each slice."""

    @staticmethod
    def pack(slices: Sequence[LoraSlice | None], dtype: torch.dtype) -> "PackedWeights":
        """Lay out slices, of which at least one is present; values are rounded to `dtype`.

        `dtype` is float32 or bfloat16. Raises ValueError where shapes do not agree.
        """
        in_features = check_shapes(slices)
        ranks = [0 if part is None else part.rank for part in slices]
        total = sum(ranks)
        words = _words(dtype)
        sizes = [
            _round_up(total, PAD_RANKS) * _round_up(in_features, words) * dtype.itemsize
            + OVERREAD_BYTES,
            _round_up(total, 16) * torch.float32.itemsize,
        ]
        for part, rank in zip(slices, ranks, strict=True):
            columns = 0 if part is None else _round_up(part.b.shape[0], PAD_COLUMNS)
            sizes.append(columns * _round_up(rank, words) * dtype.itemsize)
        *offsets, end = accumulate((_round_up(size, ALIGNMENT) for size in sizes), initial=0)
        packed = PackedWeights(
            in_features=in_features,
            slice_sizes=tuple(None if part is None else part.b.shape[0] for part in slices),
            rank_indptr=tuple(accumulate(ranks, initial=0)),
            scalings=tuple(0.0 if part is None else part.scaling for part in slices),
            dtype=dtype,
            data=torch.zeros(end, dtype=torch.uint8),
            offsets=tuple(offsets),
        )
        packed._fill(slices)
        return packed

    @property
    def total_rank(self) -> int:
        """Of all slices together."""
        return self.rank_indptr[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.data.nbytes

    @property
    def record(self) -> tuple[int, ...]:
        """The record of a slot that holds these weights; see native/add_lora.cpp."""
        base = self.data.data_ptr()
        words = [base + self.offsets[0], base + self.offsets[1], self.total_rank]
        for index, offset in enumerate(self.offsets[2:]):
            first, last = self.rank_indptr[index : index + 2]
            words += (first, last - first, base + offset)
        return tuple(words)

    def slice(self, index: int) -> LoraSlice | None:
        """The weights of one slice, copied."""
        out = self.slice_sizes[index]
        if out is None:
            return None
        first, last = self.rank_indptr[index : index + 2]
        a = torch.cat([_unpacked(block) for block in self._blocks()], dim=1)[: self.in_features]
        b = [_unpacked(panel)[: last - first] for panel in self._panels(index)]
        return LoraSlice(
            a=a[:, first:last].T.contiguous(),
            b=torch.cat(b, dim=1)[:, :out].T.contiguous() if b else a.new_zeros(0, last - first),
            scaling=self.scalings[index],
        )

    def _fill(self, slices: Sequence[LoraSlice | None]) -> None:
        scaling = self._view(1, 0, torch.float32, self.total_rank)
        stacked = torch.zeros(
            _round_up(self.total_rank, PAD_RANKS), _round_up(self.in_features, _words(self.dtype))
        ).to(self.dtype)
        for index, part in enumerate(slices):
            if part is None:
                continue
            first, last = self.rank_indptr[index : index + 2]
            stacked[first:last, : self.in_features] = part.a
            scaling[first:last] = part.scaling
            padded = _padded(part.b.T, _words(self.dtype), PAD_COLUMNS, self.dtype)
            for number, panel in enumerate(self._panels(index)):
                start = number * PANEL_COLUMNS
                _pack(padded[:, start : start + PANEL_COLUMNS], panel)
        for (first, last), block in zip(_blocks(self.total_rank), self._blocks(), strict=True):
            _pack(stacked[first:last].T, block)

    def _blocks(self) -> list[Tensor]:
        """A's blocks, as [in_features / words, ranks, words]."""
        words = _words(self.dtype)
        rows = -(-self.in_features // words)
        return [
            self._view(0, first * rows * words, self.dtype, rows, last - first, words)
            for first, last in _blocks(self.total_rank)
        ]

    def _panels(self, index: int) -> list[Tensor]:
        """B's panels of a slice, as [ranks / words, columns, words]."""
        first, last = self.rank_indptr[index : index + 2]
        words, out = _words(self.dtype), self.slice_sizes[index] or 0
        rows = -(-(last - first) // words)
        columns = _round_up(out, PAD_COLUMNS)
        return [
            self._view(
                2 + index, start * rows * words, self.dtype,
                rows, min(PANEL_COLUMNS, columns - start), words,
            )
            for start in range(0, columns, PANEL_COLUMNS)
        ]  # fmt: skip

    def _view(self, part: int, start: int, dtype: torch.dtype, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        begin = self.offsets[part] + start * dtype.itemsize
        return self.data[begin : begin + count * dtype.itemsize].view(dtype).view(shape)


def _blocks(total_rank: int) -> list[tuple[int, int]]:
    """First and last rank of each block; equal numbers of 16 as far as possible."""
    padded, units = _round_up(total_rank, PAD_RANKS), -(-total_rank // 16)
    count = -(-total_rank // BLOCK_RANKS)
    bounds = [units * block // count * 16 for block in range(count)] if count else []
    return list(zip(bounds, [*bounds[1:], padded], strict=True)) if count else []


def _pack(matrix: Tensor, out: Tensor) -> None:
    """[summed, other] -> [summed / words, other, words]."""
    rows, columns, words = out.shape
    out.copy_(matrix.reshape(rows, words, columns).transpose(1, 2))


def _unpacked(packed: Tensor) -> Tensor:
    """[summed / words, other, words] -> [summed, other]."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])


def _padded(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    shape = _round_up(matrix.shape[0], rows), _round_up(matrix.shape[1], columns)
    padded = torch.zeros(shape).to(dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def _words(dtype: torch.dtype) -> int:
    """Values along the summed axis that share a word."""
    return 2 if dtype is torch.bfloat16 else 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
