"""A linear and the LoRA that rides on it."""

from torch import Tensor

from engine.ops.protocol import LinearOp
from lora_kernels import LoraBatch, add_lora
from lora_kernels.cpu_kernels import CpuTable


class Projection:
    """A linear, possibly several of the checkpoint's fused, with the adapters' slots beside it."""

    def __init__(self, linear: LinearOp, lora: CpuTable) -> None:
        self._linear = linear
        self.lora = lora

    def __call__(self, x: Tensor, batch: LoraBatch) -> Tensor:
        """[rows, in_features] -> [rows, out_features], each row with its own adapter."""
        y = self._linear(x)
        if batch.num_segments:
            add_lora(y, x, self.lora, batch)
        return y
