"""A linear layer with the updates that adapters add to it."""

from time import perf_counter

from torch import Tensor

from engine.models.lora_meter import LoraMeter
from engine.ops.protocol import LinearOp
from lora_kernels import AffineTable, ColumnAffine, LoraBatch, add_lora
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_kernels import Table, Weights


class Projection:
    """A linear, possibly fused from several of the checkpoint's, with adapter slots beside it."""

    def __init__(self, linear: LinearOp, lora: Table) -> None:
        self._linear = linear
        self.lora = lora
        self._affine = AffineTable(lora.out_features, lora.num_slots)
        self.is_adapted = False
        """Whether any slot holds something."""
        self._held: set[int] = set()
        self.meter = LoraMeter()
        """Never on, unless the runner replaces it by one that all projections share."""

    def install(
        self, slot: int, weights: Weights | None, affine: ColumnAffine | None = None
    ) -> None:
        """Point a slot to an adapter's weights for this projection, which may be none.

        Raises ValueError where it does not fit.
        """
        self.lora.install(slot, weights)
        self._affine.install(slot, affine)
        if weights is None and affine is None:
            self._held.discard(slot)
        else:
            self._held.add(slot)
        self.is_adapted = bool(self._held)

    def clear(self, slot: int) -> None:
        """Forget what a slot holds."""
        self.lora.clear(slot)
        self._affine.install(slot, None)
        self._held.discard(slot)
        self.is_adapted = bool(self._held)

    def __call__(self, x: Tensor, batch: LoraBatch | DeviceLoraBatch) -> Tensor:
        """[rows, in_features] -> [rows, out_features], each row with its own adapter."""
        y = self._linear(x)
        if not batch.is_empty:
            began = perf_counter() if self.meter.is_on else 0.0
            add_lora(y, x, self.lora, batch)
            if self._affine.is_used:
                self._affine.apply_(y, batch)
            if self.meter.is_on:
                self.meter.seconds += perf_counter() - began
        return y
