"""What a quantisation scheme has to provide."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.ops.protocol import LinearOp
from engine.runner.padding import padded_rows


class Scheme(Protocol):
    """Weight-only: inputs, sums and outputs stay in the model's dtype, or wider.

    Weights are quantised where they lie, on the CPU or on a CUDA device.
    """

    name: str

    def make_linear(self, weights: Sequence[Tensor], bias: Tensor | None = None) -> LinearOp:
        """Quantise weights [size, in_features], each by itself, and stack them into one linear.

        So a fused projection holds the same values as its members would separately, as in
        transformers. Raises ConfigError for sizes that the scheme does not support.
        """
        ...

    def dequantized(self, weight: Tensor) -> Tensor:
        """A weight's values [out_features, in_features] once it is quantised, in its own dtype."""
        ...


class NoRows:
    """Quantised linears serve no embeddings: those stay in the model's dtype."""

    def take_rows(self, indices: Tensor) -> Tensor:
        """See `LinearOp.take_rows`."""
        raise TypeError("a quantised linear has no rows to take")


def with_padded_rows(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `multiply` to any number of rows of x [rows, inputs]; returns [rows, outputs].

    On a CPU rows are padded, so that a row's bits do not depend on how many there are.
    """
    num_rows = x.shape[0]
    missing = padded_rows(num_rows) - num_rows
    if not missing or x.device.type != "cpu":
        return multiply(x)
    return multiply(F.pad(x, (0, 0, 0, missing)))[:num_rows]
