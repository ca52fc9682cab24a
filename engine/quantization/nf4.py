"""nf4 as QLoRA has it: bitsandbytes' 4-bit normal floats with doubly quantised scales."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.quantization.libraries import load_library
from engine.quantization.scheme import NoRows, with_padded_rows

_BLOCK = 64
"""Weights that share a scale; transformers' and QLoRA's."""


class Nf4:
    """`Scheme` of `BitsAndBytesConfig(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)`.

    From QLoRA (arXiv:2305.14314). Scales are used as double quantisation leaves them, but held in
    float32, which lets the members of a fused projection stand in one linear: 4.5 bits a weight.
    """

    name = "nf4"

    def __init__(self) -> None:
        self._functional = load_library("bitsandbytes.functional", self.name)

    def make_linear(self, weights: Sequence[Tensor], bias: Tensor | None = None) -> "Nf4Linear":
        """See `Scheme.make_linear`."""
        parts = [self._quantized(weight) for weight in weights]
        shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        packed = torch.cat([packed for packed, _ in parts])
        return Nf4Linear(packed, torch.cat([scales for _, scales in parts]), shape, bias)

    def dequantized(self, weight: Tensor) -> Tensor:
        """See `Scheme.dequantized`."""
        packed, scales = self._quantized(weight)
        return torch.ops.bitsandbytes.dequantize_4bit.default(
            packed, scales, _BLOCK, "nf4", weight.shape, weight.dtype
        )

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[numel / 2, 1] uint8, [numel / 64] float32."""
        # bitsandbytes' CPU kernel gives wrong values where a block reaches over the end of a row.
        if weight.shape[1] % _BLOCK:
            raise ConfigError(
                f"quantization 'nf4' takes linears with a multiple of {_BLOCK} inputs, "
                f"not {weight.shape[1]}"
            )
        packed, state = self._functional.quantize_4bit(
            weight.contiguous(), blocksize=_BLOCK, compress_statistics=True, quant_type="nf4"
        )
        scales = self._functional.dequantize_blockwise(state.absmax, state.state2)
        return packed, scales.add_(state.offset).to(torch.float32)


class Nf4Linear(NoRows):
    """A linear through bitsandbytes: one fused kernel on CUDA, on CPUs widened in each call."""

    def __init__(
        self, packed: Tensor, scales: Tensor, shape: tuple[int, int], bias: Tensor | None
    ) -> None:
        self.out_features, self.in_features = shape
        self._packed, self._scales, self._bias = packed, scales, bias
        self._shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        """See `LinearOp`; any number of rows."""
        return with_padded_rows(self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.ops.bitsandbytes.gemm_4bit.default(
            x, self._packed, self._shape, self._scales, _BLOCK, "nf4", self._bias
        )
