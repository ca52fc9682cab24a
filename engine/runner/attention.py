"""Attention over paged keys and values, as the decoder sees it."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from engine.runner.batch_inputs import BatchInputs
from engine.runner.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """A model's attention: what a backend is made for."""

    num_heads: int
    """Query heads; a multiple of `num_kv_heads`."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens of a KV block."""
    windows: tuple[int | None, ...]
    """The windows that layers use; see `AttentionBackend.attend`."""
    scale: float
    """Factor of the scores, usually ``head_dim ** -0.5``."""
    softcap: float | None = None
    """Scaled scores become ``softcap * tanh(score / softcap)``, as in Gemma 2; None: no cap."""

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionBackend(Protocol):
    """Causal attention, with or without a sliding window, over a `KVCache`.

    A row's result must be bit-equal whatever shares its batch and however its prefill was cut.
    """

    def plan(self, inputs: BatchInputs, kv_cache: KVCache) -> Any:
        """What every layer needs of a step's batch; computed once, passed to `attend`."""
        ...

    def attend(
        self, query: Tensor, kv_cache: KVCache, layer: int, window: int | None, plan: Any
    ) -> Tensor:
        """Attention of a step's queries over the keys and values of their sequences.

        Args:
            query: [padded, num_heads, head_dim], the tokens of `BatchInputs`, positions applied.
            kv_cache: already holds the keys and values of the step's own tokens.
            layer: whose keys and values.
            window: how many positions a query sees, its own included; None: all up to its own.
            plan: of this step's batch.

        Returns:
            [padded, num_heads * head_dim], the dtype of `query`; zeros in padding rows.

        """
        ...


class StaticPlan(Protocol):
    """A plan of decode steps whose buffers keep their addresses.

    A captured CUDA graph that attends with it reads the rows of the last `update`.
    """

    def update(self, inputs: BatchInputs) -> None:
        """Take a step's rows: `starts` and `block_tables`, both on the host.

        There must be as many rows as the plan was made for, each with one token. Padding rows are
        ordinary rows: one token at position 0, on a block that no sequence owns. Copies are queued
        on the current stream, without waiting for the device.
        """
        ...


@runtime_checkable
class StaticAttention(Protocol):
    """An `AttentionBackend` that CUDA graphs can capture; others are planned in every step."""

    def make_static_plan(self, num_rows: int, max_blocks: int, kv_cache: KVCache) -> StaticPlan:
        """A plan for decode steps of `num_rows` rows with up to `max_blocks` blocks each.

        Launches depend on these numbers only: grids and splits are sized for the capacity.
        """
        ...

    def static_plan_bytes(self, num_rows: int, max_blocks: int) -> int:
        """Bytes of device memory that such a plan holds."""
        ...
