"""The engine's decoder on a device without its scheduler: prefills, decode steps, their floor."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.gpu_cases import Rates
from benchmarks.gpu_model import (
    Shape,
    Weights,
    install,
    our_decoder,
    packed,
    random_adapter,
    random_weights,
)
from engine.device.setup import DeviceSetup
from engine.device.staging import InputStager
from engine.runner.attention import AttentionShape
from engine.runner.batch_inputs import build_batch_inputs
from engine.runner.decode_ladder import DecodeLadder
from engine.runner.kv_cache import KVShape
from engine.runner.padding import padded_rows
from engine.scheduled_batch import SamplingRow, ScheduledRow
from lora_kernels.device_kernels import device_kernels, rank_rows, row_bytes

BLOCK_SIZE = 16
_SAMPLES = SamplingRow(cast(Any, None), (0,), [], 0)
"""Marks rows whose logits are wanted; nothing is drawn by it."""


class Bench:
    """A model with slots, a KV cache and a ladder of decode steps."""

    def __init__(
        self,
        shape: Shape,
        setup: DeviceSetup,
        dtype: torch.dtype,
        *,
        sizes: Sequence[int],
        context: int,
        max_tokens: int,
        pool_rows: int | None = None,
        seed: int = 0,
    ) -> None:
        """`context` positions a row at most; `max_tokens` of an eager step."""
        self.shape, self.setup, self.dtype = shape, setup, dtype
        self.device = setup.device.torch_device
        self.context = context
        self.weights: Weights = random_weights(shape, dtype, self.device, seed)
        ops = setup.make_ops(context)
        kernels = device_kernels(
            self.device,
            max_rank=setup.max_lora_rank,
            pool_rows=pool_rows or rank_rows(setup.max_loras, setup.max_lora_rank),
            pin=setup.device.pin,
        )
        self.decoder = our_decoder(
            self.weights,
            ops,
            kernels,
            num_slots=setup.max_loras,
            max_positions=context,
            dtype=dtype,
            device=self.device,
        )
        self.blocks_each = -(-context // BLOCK_SIZE)
        self._num_blocks = max(sizes) * self.blocks_each
        kv_shape = KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        self.cache = ops.make_kv_cache(kv_shape, self._num_blocks + 1)
        self.attention = ops.make_attention(
            AttentionShape(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                block_size=BLOCK_SIZE,
                windows=(None,) * shape.num_layers,
                scale=shape.head_dim**-0.5,
            )
        )
        tile = self.decoder.row_tile
        self._stager = InputStager(
            setup.device,
            setup.ragged_batch(padded_rows(max_tokens, tile), dtype),
            setup.ragged_batch(padded_rows(max(sizes), tile), dtype),
        )
        self.ladder = DecodeLadder(
            self.decoder,
            self.cache,
            self.attention,
            setup.device,
            sizes=sizes,
            max_blocks=self.blocks_each,
            padding_block=self._num_blocks,
            make_lora=lambda size: setup.static_batch(size, dtype),
        )

    def fill_cache(self) -> None:
        """Keys and values as if every position had been computed."""
        for layer in range(self.shape.num_layers):
            for values in self.cache.layer(layer):
                values.normal_()

    def fill_slots(self, count: int, rank: int) -> None:
        """The same random adapter in the first slots, nothing in the others."""
        adapter = random_adapter(self.shape, rank, dtype=self.dtype, device=self.device, seed=1)
        ready = packed(adapter, lambda values: values)
        for slot in range(self.setup.max_loras):
            for projection in self.decoder.projections.values():
                projection.clear(slot)
        for slot in range(count):
            install(self.decoder, slot, ready)

    def rows(
        self, tokens: Sequence[Sequence[int]], start: int, slots: Sequence[int | None]
    ) -> list[ScheduledRow]:
        """One row a sequence, each with blocks of its own, its first token at `start`."""
        return [
            ScheduledRow(
                sequence_id=index,
                token_ids=list(ids),
                start=start,
                block_table=self._table(index, start + len(ids)),
                slot=slot,
                sampling=_SAMPLES,
            )
            for index, (ids, slot) in enumerate(zip(tokens, slots, strict=True))
        ]

    def decode_rows(self, batch: int, adapters: int, position: int) -> list[ScheduledRow]:
        """`batch` decodes at `position`; adapters in turn, none where there are 0."""
        slots = [index % adapters if adapters else None for index in range(batch)]
        tokens = [[7 * index % self.shape.vocab_size] for index in range(batch)]
        return self.rows(tokens, position, slots)

    @torch.inference_mode()
    def eager(self, rows: Sequence[ScheduledRow]) -> Tensor:
        """One step as prefills run; logits in the rows' order."""
        inputs = build_batch_inputs(rows, BLOCK_SIZE, self.decoder.row_tile)
        placed = self._stager.place(inputs)
        self.cache.clear_blocks(placed.fresh_blocks)
        logits = self.decoder.forward(placed, self.cache, self.attention)
        return _reordered(logits, inputs.logit_rows)

    @torch.inference_mode()
    def prepared(self, rows: Sequence[ScheduledRow]) -> Callable[[], Tensor]:
        """A decode step on static buffers, ready to be queued any number of times."""
        _, run = self.ladder.prepare(rows)
        return torch.inference_mode()(run)

    @torch.inference_mode()
    def graphed(self, rows: Sequence[ScheduledRow]) -> Tensor:
        """One decode step on static buffers; logits in the rows' order."""
        order, run = self.ladder.prepare(rows)
        return _reordered(run(), order)

    def _table(self, index: int, length: int) -> list[int]:
        count = -(-length // BLOCK_SIZE)
        first = index * self.blocks_each
        return list(range(first, first + count))


def floor_microseconds(
    shape: Shape,
    rates: Rates,
    *,
    batch: int,
    context: int,
    adapter_rows: int = 0,
    row_ranks: int = 0,
    element_bytes: int = 2,
) -> float:
    """What a decode step takes at least: its bytes or its operations, at the device's own rates.

    `adapter_rows` are rank rows of the adapters in use, `row_ranks` the ranks summed over rows.
    """
    num_bytes = element_bytes * (
        shape.num_weights + batch * context * shape.num_kv_values + adapter_rows * shape.lora_width
    )
    scores = 4 * batch * context * shape.num_layers * shape.num_heads * shape.head_dim
    flops = 2 * batch * shape.num_weights + scores + 2 * row_ranks * shape.lora_width
    return 1e6 * max(num_bytes / rates.bytes_per_second, flops / rates.flops_per_second)


def adapter_pool_rows(shape: Shape, dtype: torch.dtype, free: int, wanted: int) -> int:
    """Rank rows of every pool: what is wanted, or what a third of the free memory holds."""
    sizes = [*shape.linears.values(), (shape.hidden, (shape.vocab_size,))]
    layers = [shape.num_layers] * len(shape.linears) + [1]
    each = sum(
        count * row_bytes(inputs, slices, dtype)
        for count, (inputs, slices) in zip(layers, sizes, strict=True)
    )
    return min(wanted, int(free / 3) // each // 8 * 8)


def _reordered(logits: Tensor, order: Sequence[int]) -> Tensor:
    places = torch.tensor([order.index(row) for row in range(len(order))], device=logits.device)
    return logits.index_select(0, places)
