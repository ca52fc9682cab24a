"""Which rows of a step belong to which adapter slot."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Rows grouped into segments, one for each slot in use; rows of the base are in none.

    Kernels read rows through `permutation`, so rows need not move. The same batch serves every
    projection of a step.
    """

    num_rows: int
    """x and y have at least this many rows; further ones (padding) are left alone."""
    permutation: Tensor
    """[segment_indptr[-1]] int64: row numbers, segment after segment, ascending in each."""
    segment_indptr: tuple[int, ...]
    """Entries `segment_indptr[i]:segment_indptr[i + 1]` of `permutation` are segment i."""
    segment_slot: tuple[int, ...]
    """Slot of each segment; no slot twice."""
    segment_start: tuple[int | None, ...]
    """First row of a segment whose rows are consecutive, else None."""
    words: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """The same, for the compiled kernel: number of segments, indptr, slots, permutation."""
    address: int = field(init=False, repr=False, compare=False)
    """Memory address of `words`."""
    max_slot: int = field(init=False, repr=False, compare=False)
    """The largest of `segment_slot`; -1 where there is none."""

    def __post_init__(self) -> None:
        head = (self.num_segments, *self.segment_indptr, *self.segment_slot)
        words = np.concatenate([np.array(head, dtype=np.int64), self.permutation.numpy()])
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "address", words.ctypes.data)
        object.__setattr__(self, "max_slot", max(self.segment_slot, default=-1))

    @staticmethod
    def from_runs(slots: Sequence[int | None], lengths: Sequence[int]) -> "LoraBatch":
        """Build from runs of rows: run i has `lengths[i]` rows of `slots[i]` (None: base model)."""
        rows_of: dict[int, list[range]] = {}
        num_rows = 0
        for slot, length in zip(slots, lengths, strict=True):
            if slot is not None:
                rows_of.setdefault(slot, []).append(range(num_rows, num_rows + length))
            num_rows += length
        indptr, starts, order = [0], list[int | None](), list[int]()
        for _, runs in sorted(rows_of.items()):
            rows = [row for run in runs for row in run]
            consecutive = not rows or rows[-1] - rows[0] == len(rows) - 1
            starts.append((rows[0] if rows else 0) if consecutive else None)
            order += rows
            indptr.append(len(order))
        return LoraBatch(
            num_rows=num_rows,
            permutation=torch.tensor(order, dtype=torch.int64),
            segment_indptr=tuple(indptr),
            segment_slot=tuple(sorted(rows_of)),
            segment_start=tuple(starts),
        )

    @property
    def num_segments(self) -> int:
        """How many slots the batch uses."""
        return len(self.segment_slot)

    @property
    def is_empty(self) -> bool:
        """Whether no row has an adapter."""
        return not self.segment_slot
