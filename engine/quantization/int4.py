"""int4: groups of weights with a scale and a zero, in the layout of PyTorch's own kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.quantization.libraries import load_library
from engine.quantization.scheme import NoRows

_GROUPS = (64, 32)
"""Weights of a row that share a scale; the first that divides in_features."""


class Int4:
    """`Scheme` of torchao's tinygemm format; each weight is ``(q - 8) * scale + zero``."""

    name = "int4"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cuda" and dtype is not torch.bfloat16:
            raise ConfigError("quantization 'int4' on CUDA takes dtype bfloat16 only")
        self._utils = load_library("torchao.quantization.utils", self.name)

    def make_linear(self, weights: Sequence[Tensor], bias: Tensor | None = None) -> "Int4Linear":
        """See `Scheme.make_linear`."""
        weight = torch.cat(list(weights))
        out_features, in_features = weight.shape
        group = _group_of(in_features)
        if out_features % 16:
            raise ConfigError(
                f"quantization 'int4' takes linears with a multiple of 16 outputs, "
                f"not {out_features}"
            )
        values, scales_and_zeros = self._quantized(weight, group)
        if weight.device.type == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        else:
            # The kernel's inner loop takes 16 inputs at a time, 2, 4 or 8 times over.
            tiles = next(tiles for tiles in (8, 4, 2) if in_features % (16 * tiles) == 0)
            packed = torch.ops.aten._convert_weight_to_int4pack(values, tiles)
        return Int4Linear(packed, scales_and_zeros, (out_features, in_features), group, bias)

    def dequantized(self, weight: Tensor) -> Tensor:
        """See `Scheme.dequantized`."""
        group = _group_of(weight.shape[1])
        values, scales_and_zeros = self._quantized(weight, group)
        return self._utils.groupwise_affine_dequantize_tensor(
            values, scales_and_zeros, n_bit=4, groupsize=group
        ).to(weight.dtype)

    def _quantized(self, weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Values, [in / group, out, 2] scales and zeros.

        Values are [out, in] int32 on CPUs, [out, in / 2] uint8 elsewhere.
        """
        return self._utils.groupwise_affine_quantize_tensor(
            weight, n_bit=4, groupsize=group, dtype=weight.dtype
        )


class Int4Linear(NoRows):
    """A linear through PyTorch's int4 kernel of the device."""

    def __init__(
        self,
        packed: Tensor,
        scales_and_zeros: Tensor,
        shape: tuple[int, int],
        group: int,
        bias: Tensor | None,
    ) -> None:
        self.out_features, self.in_features = shape
        self._packed, self._scales_and_zeros = packed, scales_and_zeros
        self._group, self._bias = group, bias
        is_on_cpu = packed.device.type == "cpu"
        aten = torch.ops.aten
        self._multiply = aten._weight_int4pack_mm_for_cpu if is_on_cpu else aten._weight_int4pack_mm

    def __call__(self, x: Tensor) -> Tensor:
        """See `LinearOp`; any number of rows."""
        y = self._multiply(x, self._packed, self._group, self._scales_and_zeros)
        return y if self._bias is None else y.add_(self._bias)


def _group_of(in_features: int) -> int:
    for group in _GROUPS:
        if in_features % group == 0:
            return group
    raise ConfigError(
        f"quantization 'int4' takes linears with a multiple of {_GROUPS[-1]} inputs, "
        f"not {in_features}"
    )
