"""A factor and a summand for each output of a projection, by adapter.

That is what DoRA and trained biases amount to once the low-rank update was added. Few adapters have
them, so this is plain PyTorch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_kernels.batch import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch


@dataclass(frozen=True, slots=True)
class ColumnAffine:
    """One adapter's ``y * scale + shift`` for one projection."""

    scale: Tensor | None
    """[out_features] float32; None for 1."""
    shift: Tensor | None
    """[out_features] float32; None for 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(part.nbytes for part in (self.scale, self.shift) if part is not None)


class AffineTable:
    """The slots of one projection: written when an adapter comes or goes, read in each step."""

    def __init__(self, out_features: int, num_slots: int) -> None:
        self.out_features = out_features
        self.is_used = False
        """Whether any slot holds something."""
        self._slots: list[ColumnAffine | None] = [None] * num_slots

    def install(self, slot: int, affine: ColumnAffine | None) -> None:
        """Point a slot to an adapter's vectors, or to none.

        Raises ValueError where they do not fit the projection; the slot is then unchanged.
        """
        for part in () if affine is None else (affine.scale, affine.shift):
            if part is not None and part.shape != (self.out_features,):
                raise ValueError(f"{list(part.shape)} for {self.out_features} outputs")
        self._slots[slot] = affine
        self.is_used = any(held is not None for held in self._slots)

    def apply_(self, y: Tensor, batch: LoraBatch | DeviceLoraBatch) -> None:
        """Change the rows of y [rows, out_features] in place, each by its own adapter's vectors.

        Computed in float32 and rounded once to y's dtype. Element by element, so that a row's bits
        do not depend on its neighbours.
        """
        for segment, slot in enumerate(batch.segment_slot):
            affine = self._slots[slot]
            begin, end = batch.segment_indptr[segment : segment + 2]
            if affine is None or begin == end:
                continue
            rows = batch.permutation[begin:end].long()
            values = y.index_select(0, rows).to(torch.float32)
            if affine.scale is not None:
                values.mul_(affine.scale)
            if affine.shift is not None:
                values.add_(affine.shift)
            y.index_copy_(0, rows, values.to(y.dtype))
