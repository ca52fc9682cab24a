"""int8 and fp8: one scale for each output, values as torchao rounds them."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization.libraries import load_library
from engine.quantization.scheme import NoRows, with_padded_rows


class PerChannel:
    """`Scheme` of torchao's `Int8WeightOnlyConfig` and `Float8WeightOnlyConfig` (e4m3)."""

    def __init__(self, name: Literal["int8", "fp8"]) -> None:
        self.name = name
        module = load_library("torchao.quantization", name)
        self._tensor = module.Int8Tensor if name == "int8" else module.Float8Tensor
        self._per_row = module.PerRow()

    def make_linear(
        self, weights: Sequence[Tensor], bias: Tensor | None = None
    ) -> "PerChannelLinear":
        """See `Scheme.make_linear`."""
        return PerChannelLinear(*self._quantized(torch.cat(list(weights))), bias, weights[0].dtype)

    def dequantized(self, weight: Tensor) -> Tensor:
        """See `Scheme.dequantized`."""
        values, scales = self._quantized(weight)
        return values.to(torch.float32).mul_(scales.unsqueeze(1)).to(weight.dtype)

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        quantized = self._tensor.from_hp(weight, granularity=self._per_row)
        return quantized.qdata, quantized.scale.to(torch.float32).flatten()


class PerChannelLinear(NoRows):
    """A linear with values [out_features, in_features] of one byte, scales [out_features].

    int8 in bfloat16 on CPUs is PyTorch's own kernel. All others are widened in each call, as
    torchao does where nothing is compiled: it saves memory, and costs time.
    """

    def __init__(
        self, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.out_features, self.in_features = values.shape
        self._values, self._scales, self._bias = values, scales, bias
        self._narrow_scales: Tensor | None = None
        is_on_cpu = values.device.type == "cpu"
        if is_on_cpu and values.dtype is torch.int8 and dtype is torch.bfloat16:
            self._narrow_scales = scales.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """See `LinearOp`; any number of rows."""
        if self._narrow_scales is not None:
            y = torch.ops.aten._weight_int8pack_mm(x, self._values, self._narrow_scales)
        else:
            y = with_padded_rows(self._multiply, x).mul_(self._scales)
        return y if self._bias is None else y.add_(self._bias)

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._values.to(x.dtype))
