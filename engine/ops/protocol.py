"""The operations of a decoder that have more than one implementation."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.models.rotary import RotaryTable
from engine.runner.attention import AttentionBackend, AttentionShape
from engine.runner.kv_cache import KVCache, KVShape


class Draw(NamedTuple):
    """One draw from one row of logits."""

    row: int
    best: int
    """The row's argmax."""
    key: int
    """Key of the noise; see `engine.sampling.noise.stream_key`."""
    temperature: float
    min_p: float
    """Tokens less probable than `min_p` times the best one are not drawn."""


class LinearOp(Protocol):
    """``x @ weight.T + bias``; a row's bits do not depend on the other rows."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] -> [rows, out_features]; `rows` is a multiple of `row_tile`."""
        ...

    def take_rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, [indices, in_features]: the embeddings of a tied head.

        Only of a linear made with `keep_rows`.
        """
        ...


class RotationOp(Protocol):
    """Rotates the heads of a step's tokens."""

    def __call__(self, heads: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> the same; may be in place."""
        ...


class HeadNorms(NamedTuple):
    """Norms of queries and keys before the rotation, applied to each head by itself (Qwen3)."""

    query: Tensor
    """[head_dim]; as `DecoderOps.norm` takes it."""
    key: Tensor
    eps: float


@runtime_checkable
class StoringRotation(Protocol):
    """A `RotationOp` that in the same launch norms heads first and stores keys and values after."""

    def store(
        self,
        heads: Tensor,
        num_heads: int,
        kv_cache: Any,
        layer: int,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate and store `heads` [rows, num_heads + 2 * num_kv_heads, head_dim].

        They are the queries, keys and values of a step. `kv_cache` was made by the same operations.
        Returns the queries [rows, num_heads, head_dim], a view of `heads`.
        """
        ...


class DecoderOps(Protocol):
    """Every operation gives a row the same bits whatever the other rows are."""

    name: str
    """`torch`, or `native` and the instruction set."""
    fallback_reason: str | None
    """Why `auto` did not choose compiled operations; None if it did."""

    def row_tile(self, dtype: torch.dtype) -> int:
        """Rows of a linear come in multiples of this."""
        ...

    def make_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, keep_rows: bool = False
    ) -> LinearOp:
        """Make a linear of a weight [out_features, in_features], in whatever layout is fastest.

        With `keep_rows` it can also `take_rows`.
        """
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension of x [rows, size] or [rows, heads, size].

        Computed in float32 and rounded as in transformers: a weight in x's dtype multiplies values
        that were rounded to it before (Llama); a float32 weight is applied before the only rounding
        (Gemma).
        """
        ...

    def add_and_norm_(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `update` to the residual x [rows, size], in place; returns the norm of the sum."""
        ...

    def activate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[rows, 2 * n] -> [rows, n]: ``activation(gate) * up``.

        `activation` is `silu` or `gelu_pytorch_tanh`.
        """
        ...

    def rotation(self, table: RotaryTable, positions: Tensor) -> RotationOp:
        """The rotation of a step's tokens at `positions` [rows]; serves every layer."""
        ...

    def make_kv_cache(self, shape: KVShape, num_blocks: int) -> KVCache:
        """A cache in the layout that `make_attention`'s backend reads."""
        ...

    def make_attention(self, shape: AttentionShape) -> AttentionBackend:
        """Attention of one model over such a cache; raises ConfigError where it cannot be had."""
        ...

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """Draw token ids from the softmax of rows of logits [rows, size], each with a finite one.

        -inf is never drawn; no logit is NaN or inf.
        Uses an exponential race with the noise of `engine.sampling.noise`.
        """
        ...

    def argmax(self, logits: Tensor) -> list[int]:
        """For each row of [rows, size], the lowest index of the largest logit.

        -1 if any logit of the row is not finite.
        """
        ...
