"""Linears whose rows do not depend on how many there are, and the LoRA that rides on them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_kernels import LoraBatch, add_lora
from lora_kernels.cpu_kernels import CpuTable

ROW_TILE = 16
"""Rows come in multiples of this. oneDNN and MKL pick other kernels, with other orders of sums,
for a few small row counts; over multiples of 16 a row's bits are the same for any count."""


def padded_rows(num_rows: int) -> int:
    """The next multiple of `ROW_TILE`."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


class Linear:
    """``x @ weight.T + bias`` with the weight in oneDNN's own layout where there is one.

    The packed layout saves a reorder in each call: a quarter of a decode step's GEMM time in
    bfloat16, nearly half in float32 (Zen 4, 16 to 32 rows).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        if pack and _can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2 * ROW_TILE)
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] -> [rows, out_features]; `rows` is a multiple of `ROW_TILE`."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias)


class Projection:
    """A linear, possibly several of the checkpoint's fused, with the adapters' slots beside it."""

    def __init__(self, linear: Linear, lora: CpuTable) -> None:
        self._linear = linear
        self.lora = lora

    def __call__(self, x: Tensor, batch: LoraBatch) -> Tensor:
        """[rows, in_features] -> [rows, out_features], each row with its own adapter."""
        y = self._linear(x)
        add_lora(y, x, self.lora, batch)
        return y


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (weight.dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
