"""Attention over paged keys and values, as the decoder sees it."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from engine.batch_inputs import BatchInputs
from engine.kv_cache import KVCache


class AttentionBackend(Protocol):
    """Causal attention, with or without a sliding window, over a `KVCache`.

    How scores are scaled, and whether they are capped, is a backend's own, set when it is made.
    A row's result must be bit-equal whatever shares its batch and however its prefill was cut.
    """

    def plan(self, inputs: BatchInputs, kv_cache: KVCache) -> Any:
        """What a step's batch needs in every layer; computed once, passed to `attend`."""
        ...

    def attend(
        self, query: Tensor, kv_cache: KVCache, layer: int, window: int | None, plan: Any
    ) -> Tensor:
        """Attention of a step's queries over the keys and values of their sequences.

        Args:
            query: [padded, num_heads, head_dim], the tokens of `BatchInputs`, positions applied.
            kv_cache: already holds the keys and values of the step's own tokens.
            layer: whose keys and values.
            window: positions that a query sees, its own included; None: all up to its own.
            plan: of this step's batch.

        Returns:
            [padded, num_heads * head_dim], the dtype of `query`; zeros in padding rows.

        """
        ...


class StaticPlan(Protocol):
    """A plan of decode steps whose buffers keep their addresses.

    A captured CUDA graph that attends with it reads whatever rows the last `update` brought.
    """

    def update(self, inputs: BatchInputs) -> None:
        """Take a step's rows: `starts` and `block_tables`, both on the host.

        There are as many rows as the plan was made for, each with one token. Padded ones are rows
        like others: one token at position 0, on a block that no sequence owns. Copies are queued
        on the current stream; nothing waits for the device.
        """
        ...


@runtime_checkable
class StaticAttention(Protocol):
    """An `AttentionBackend` that can be captured; others are planned anew in each step."""

    def make_static_plan(self, num_rows: int, max_blocks: int, kv_cache: KVCache) -> StaticPlan:
        """For decode steps of `num_rows` rows with tables of up to `max_blocks`, for `attend`.

        Launches depend on these numbers only: grids and splits are those of the capacity.
        """
        ...

    def static_plan_bytes(self, num_rows: int, max_blocks: int) -> int:
        """Of device memory that such a plan holds."""
        ...
