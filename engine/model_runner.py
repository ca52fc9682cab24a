"""Runs scheduled batches: tensors on this side, decisions on the scheduler's."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.adapter_weights import AdapterWeights
from engine.attention import AttentionBackend
from engine.batch_inputs import build_batch_inputs
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.scheduled_batch import (
    SampledRow,
    SamplingRow,
    ScheduledBatch,
    ScheduledRow,
    StepResult,
)


class RowSampler(Protocol):
    """Draws tokens from logits, a row of logits for each sampling row."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """`logits` is [len(rows), vocab_size], in the model's dtype."""
        ...


class ModelRunner:
    """Executes batches on one model; the engine's `engine.adapter_source.Runner`."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        sampler: RowSampler,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._attention = attention
        self._sampler = sampler
        self.projections = decoder.projections
        """Every projection of the model, with its adapter slots."""

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: clear slots, copy blocks, one forward pass, sampling."""
        for slot in batch.cleared_slots:
            self.clear_slot(slot)
        self._kv_cache.copy_blocks(batch.block_copies)
        results: list[SampledRow | None] = [None] * len(batch.rows)
        if batch.rows:
            for index, sampled in self._run(batch.rows):
                results[index] = sampled
        return StepResult(results)

    def install_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Point a slot to an adapter's weights; no row of the batch being run may use the slot."""
        for key, projection in self.projections.items():
            projection.install(slot, weights.projections.get(key), weights.affines.get(key))
        self._decoder.embedding_lora.install(slot, weights.embedding)

    def clear_slot(self, slot: int) -> None:
        """Forget a slot's weights."""
        for projection in self.projections.values():
            projection.clear(slot)
        self._decoder.embedding_lora.install(slot, None)

    def _run(self, rows: Sequence[ScheduledRow]) -> list[tuple[int, SampledRow]]:
        inputs = build_batch_inputs(rows, self._kv_cache.block_size, self._decoder.row_tile)
        self._kv_cache.clear_blocks(inputs.fresh_blocks)
        logits = self._decoder.forward(inputs, self._kv_cache, self._attention)
        sampling = [row for i in inputs.logit_rows if (row := rows[i].sampling) is not None]
        if not sampling:
            return []
        sampled = self._sampler.sample(logits, sampling)
        return list(zip(inputs.logit_rows, sampled, strict=True))
