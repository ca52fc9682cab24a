"""Runs scheduled batches: tensors on this side, decisions on the scheduler's."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.lora_meter import LoraMeter
from engine.runner.adapter_weights import AdapterWeights
from engine.runner.attention import AttentionBackend
from engine.runner.batch_inputs import build_batch_inputs
from engine.runner.decode_ladder import DecodeLadder
from engine.runner.kv_cache import KVCache
from engine.sampling.launched import RowSampler
from engine.scheduled_batch import (
    RunSeconds,
    SampledRow,
    ScheduledBatch,
    ScheduledRow,
    StepResult,
)


class ModelRunner:
    """Executes batches on one model; the engine's `engine.runner.protocol.Runner`."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        sampler: RowSampler,
        ladder: DecodeLadder | None = None,
    ) -> None:
        """With a `ladder`, decode steps run on its static buffers, padded, as on a GPU."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._attention = attention
        self._sampler = sampler
        self._ladder = ladder
        self.projections = decoder.projections
        """Every projection of the model, with its adapter slots."""
        self._meter = LoraMeter()
        for projection in self.projections.values():
            projection.meter = self._meter

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: clear slots, copy blocks, one forward pass, sampling."""
        began = perf_counter()
        for slot in batch.cleared_slots:
            self.clear_slot(slot)
        self._kv_cache.copy_blocks(batch.block_copies)
        results: list[SampledRow | None] = [None] * len(batch.rows)
        if not batch.rows:
            return StepResult(results)
        drawn, seconds = self._run(batch.rows, began)
        for index, sampled in drawn:
            results[index] = sampled
        return StepResult(results, seconds)

    def install_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Point a slot to an adapter's weights; no row of the batch being run may use the slot."""
        for key, projection in self.projections.items():
            projection.install(slot, weights.projections.get(key), weights.affines.get(key))
        self._decoder.embedding_lora.install(slot, weights.embedding)
        self._decoder.own_weights.install(slot, weights.own)
        if self._ladder is not None and weights.is_uncommon:
            self._ladder.uncommon_slots.add(slot)

    def clear_slot(self, slot: int) -> None:
        """Forget a slot's weights."""
        for projection in self.projections.values():
            projection.clear(slot)
        self._decoder.embedding_lora.install(slot, None)
        self._decoder.own_weights.install(slot, None)
        if self._ladder is not None:
            self._ladder.uncommon_slots.discard(slot)

    def _run(
        self, rows: Sequence[ScheduledRow], began: float
    ) -> tuple[list[tuple[int, SampledRow]], RunSeconds]:
        is_metered = any(row.slot is not None for row in rows)
        if is_metered:
            self._meter.begin(is_prefill=any(len(row.token_ids) > 1 for row in rows))
        if self._ladder is not None and self._ladder.takes(rows):
            order, compute = self._ladder.prepare(rows)
        else:
            order, compute = self._prepare(rows)
        prepared = perf_counter()
        logits = compute()
        computed = perf_counter()
        lora = self._meter.end(computed - prepared) if is_metered else 0.0
        sampling = [row for i in order if (row := rows[i].sampling) is not None]
        sampled = self._sampler.sample(logits, sampling) if sampling else []
        seconds = RunSeconds(prepared - began, lora, perf_counter() - computed)
        return list(zip(order, sampled, strict=True)), seconds

    def _prepare(
        self, rows: Sequence[ScheduledRow]
    ) -> tuple[tuple[int, ...], Callable[[], Tensor]]:
        inputs = build_batch_inputs(rows, self._kv_cache.block_size, self._decoder.row_tile)
        self._kv_cache.clear_blocks(inputs.fresh_blocks)
        return inputs.logit_rows, lambda: self._decoder.forward(
            inputs, self._kv_cache, self._attention
        )
