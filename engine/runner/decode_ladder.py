"""Decode steps at a ladder of sizes: buffers that keep their addresses, and graphs for each size.

A step with one token in each row runs at the next size up, its last rows being padding
(`decode_buffers`). Each size has two graphs, without adapters and with them, so that steps of the
base alone launch no adapter kernels. What a graph does not cover runs eagerly: prefills, and
adapters that have an embedding or output layer, DoRA, trained biases or norms.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.device.device import Device, Replay
from engine.models.decoder import Decoder
from engine.runner.attention import AttentionBackend, StaticAttention, StaticPlan
from engine.runner.batch_inputs import BatchInputs
from engine.runner.decode_buffers import DecodeBuffers
from engine.runner.kv_cache import KVCache
from engine.scheduled_batch import ScheduledRow
from lora_kernels.device_batch import DeviceLoraBatch

_FINE, _MIDDLE, _COARSE = 8, 16, 32
_FINE_UP_TO, _MIDDLE_UP_TO = 64, 256


def ladder_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 up to 64, of 16 up to 256 and of 32; the last is `max_num_seqs`.

    A step is padded by less than 8 rows up to 64, and by an eighth at most beyond.
    """
    sizes = [
        1,
        2,
        4,
        *range(_FINE, _FINE_UP_TO, _FINE),
        *range(_FINE_UP_TO, _MIDDLE_UP_TO, _MIDDLE),
        *range(_MIDDLE_UP_TO, max_num_seqs, _COARSE),
    ]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class DecodeLadder:
    """Runs the decode steps of one model."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        device: Device,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        padding_block: int,
        make_lora: Callable[[int], DeviceLoraBatch] | None = None,
    ) -> None:
        """Make the buffers; graphs are captured when they are first needed, or by `capture`.

        Args:
            decoder: the model.
            kv_cache: has at least one block that the scheduler does not use.
            attention: if it is a `StaticAttention`, each size gets a static plan.
            device: of all tensors.
            sizes: rows of a step, ascending.
            max_blocks: the most blocks that a row may have; longer rows do not run here.
            padding_block: that block, for padding rows.
            make_lora: rows -> a static batch, on devices whose adapters need one.

        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._device = device
        self._sizes = tuple(sizes)
        self._max_blocks = max_blocks
        self.uncommon_slots: set[int] = set()
        """Slots of adapters that graphs do not cover; their rows do not run here."""
        kv_cache.clear_blocks(torch.tensor([padding_block], device=device.torch_device))
        self._rungs = [
            _Rung(
                DecodeBuffers(
                    size,
                    max_blocks=max_blocks,
                    padding_block=padding_block,
                    block_size=kv_cache.block_size,
                    row_tile=decoder.row_tile,
                    device=device,
                    lora=None if make_lora is None else make_lora(size),
                ),
                attention,
                kv_cache,
            )
            for size in self._sizes
        ]

    def takes(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether graphs can run these rows: a decode step that is not too large."""
        if not rows or len(rows) > self._sizes[-1]:
            return False
        uncommon, max_blocks = self.uncommon_slots, self._max_blocks
        return all(
            len(row.token_ids) == 1
            and row.sampling is not None
            and len(row.block_table) <= max_blocks
            and row.slot not in uncommon
            for row in rows
        )

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        drawn: Callable[[Tensor, tuple[int, ...]], None] | None = None,
    ) -> tuple[tuple[int, ...], Callable[[], Tensor]]:
        """Lay out a step of rows that `takes` allows.

        `drawn(token_ids, order)` writes the rows' tokens, if the host does not have them yet.
        Returns the order of the rows, and a function that queues the forward pass. That function
        returns the logits [rows, vocab_size] in this order; the next step overwrites them.
        """
        rung = self._rungs[bisect_left(self._sizes, len(rows))]
        order = rung.buffers.fill(rows)
        if drawn is not None:
            drawn(rung.buffers.token_ids[: len(rows)], order)
        inputs = rung.buffers.inputs
        if self._kv_cache.needs_clearing and inputs.fresh_blocks.numel():
            fresh = inputs.fresh_blocks.numpy()
            self._kv_cache.clear_blocks(self._device.send(fresh))
        if rung.plan is not None:
            rung.plan.update(inputs)
        graph = self._graph(rung)
        return order, lambda: graph.run()[: len(rows)]

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture all graphs, the largest first, on padding alone; returns how many there are.

        Graphs with adapters are captured where the device has static batches of them.
        """
        for rung in reversed(self._rungs):
            if rung.plan is not None:
                rung.plan.update(rung.buffers.inputs)
            self._graph(rung)
            if (lora := rung.buffers.lora) is not None:
                rung.buffers.inputs = replace(rung.buffers.inputs, lora=lora)
                self._graph(rung)
        return sum(len(rung.graphs) for rung in self._rungs)

    def _graph(self, rung: "_Rung") -> Replay:
        has_adapters = not rung.buffers.inputs.lora.is_empty
        graph = rung.graphs.get(has_adapters)
        if graph is None:
            decoder, kv_cache = self._decoder, self._kv_cache
            graph = rung.graphs[has_adapters] = self._device.capture(
                lambda: decoder.forward(rung.buffers.inputs, kv_cache, rung.attention)
            )
        return graph


class _Rung:
    """One size."""

    def __init__(
        self, buffers: DecodeBuffers, attention: AttentionBackend, kv_cache: KVCache
    ) -> None:
        self.buffers = buffers
        self.graphs: dict[bool, Replay] = {}
        self.plan: StaticPlan | None = None
        self.attention = attention
        if isinstance(attention, StaticAttention):
            self.plan = attention.make_static_plan(buffers.size, buffers.max_blocks, kv_cache)
            self.attention = _Planned(attention, self.plan)


class _Planned:
    """An `AttentionBackend` with a plan that was made before."""

    def __init__(self, attention: Any, plan: StaticPlan) -> None:
        self._attention: AttentionBackend = attention
        self._plan = plan

    def plan(self, inputs: BatchInputs, kv_cache: KVCache) -> StaticPlan:
        """See `AttentionBackend.plan`."""
        return self._plan

    def attend(
        self, query: Tensor, kv_cache: KVCache, layer: int, window: int | None, plan: Any
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        return self._attention.attend(query, kv_cache, layer, window, plan)
