"""Linears in bfloat16 through the compiled kernel: any number of rows, one order of sums."""

import torch
from torch import Tensor

from engine.ops.native_library import NativeLibrary

PANEL = 32
"""Columns of a panel; see native/linear.h."""
INSTRUCTION_SET = "avx512_bf16"
"""The only one that multiplies pairs of bfloat16; elsewhere oneDNN is faster than we are."""


class NativeLinear:
    """A linear with its weight in panels, as native/linear.h reads it."""

    def __init__(self, library: NativeLibrary, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        panels = -(-self.out_features // PANEL)
        padded = weight.new_zeros(panels * PANEL, self.in_features)
        padded[: self.out_features] = weight
        by_pairs = padded.view(panels, PANEL, self.in_features // 2, 2)
        self._weight = by_pairs.transpose(1, 2).contiguous()
        self._bias = torch.zeros(panels * PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias
        self._linear, self._gather_rows = library.linear, library.gather_rows

    def __call__(self, x: Tensor) -> Tensor:
        """See `LinearOp`."""
        rows = x.shape[0]
        assert x.dtype is torch.bfloat16 and x.shape[1] == self.in_features and x.stride(1) == 1
        y = x.new_empty(rows, self.out_features)
        self._linear(
            torch.get_num_threads(),
            rows,
            x.data_ptr(),
            x.stride(0),
            self.in_features,
            self._weight.data_ptr(),
            self._bias.data_ptr(),
            self.out_features,
            y.data_ptr(),
        )
        return y

    def take_rows(self, indices: Tensor) -> Tensor:
        """See `LinearOp`."""
        assert indices.dtype is torch.int64 and indices.is_contiguous()
        y = self._weight.new_empty(indices.shape[0], self.in_features)
        self._gather_rows(
            indices.shape[0],
            indices.data_ptr(),
            self.in_features,
            self._weight.data_ptr(),
            y.data_ptr(),
        )
        return y


def can_run(weight: Tensor) -> bool:
    """Whether a weight is one that the kernel takes."""
    return weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0
