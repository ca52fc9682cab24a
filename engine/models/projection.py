"""A linear and what adapters add to it."""

from torch import Tensor

from engine.ops.protocol import LinearOp
from lora_kernels import AffineTable, ColumnAffine, LoraBatch, add_lora
from lora_kernels.cpu_kernels import CpuTable, CpuWeights


class Projection:
    """A linear, possibly several of the checkpoint's fused, with the adapters' slots beside it."""

    def __init__(self, linear: LinearOp, lora: CpuTable) -> None:
        self._linear = linear
        self.lora = lora
        self._affine = AffineTable(lora.out_features, lora.num_slots)
        self.is_adapted = False
        """Whether any slot holds something."""
        self._held: set[int] = set()

    def install(
        self, slot: int, weights: CpuWeights | None, affine: ColumnAffine | None = None
    ) -> None:
        """Point a slot to what an adapter has for this projection, which may be nothing.

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

    def __call__(self, x: Tensor, batch: LoraBatch) -> Tensor:
        """[rows, in_features] -> [rows, out_features], each row with its own adapter."""
        y = self._linear(x)
        if batch.num_segments:
            add_lora(y, x, self.lora, batch)
            if self._affine.is_used:
                self._affine.apply_(y, batch)
        return y
