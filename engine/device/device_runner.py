"""Runs steps on a device: they are queued without waiting, and one small copy comes back.

    host      plan n+1, send n's outputs, queue n+1 ...
    device    step n ............................... step n+1 ...

A step planned ahead takes its tokens from those that the step before drew, on the device, by index.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.device.adapter_transfers import AdapterTransfers, SlotTransfer
from engine.device.device import Device
from engine.device.staging import InputStager
from engine.models.decoder import Decoder
from engine.models.own_weights import OwnWeights
from engine.runner.adapter_weights import AdapterWeights
from engine.runner.attention import AttentionBackend
from engine.runner.batch_inputs import build_batch_inputs
from engine.runner.decode_ladder import DecodeLadder
from engine.runner.kv_cache import KVCache
from engine.sampling.launched import LaunchedDraw, LaunchingSampler
from engine.scheduled_batch import (
    SampledRow,
    SamplingRow,
    ScheduledBatch,
    ScheduledRow,
    StepResult,
)
from lora_kernels import ColumnAffine, EmbeddingLora


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """An `engine.runner.protocol.RunningStep`."""

    num_rows: int
    rows: tuple[int, ...] = ()
    """For each draw, the index of its row in the batch."""
    draw: LaunchedDraw | None = None
    """None if no row samples."""

    def result(self) -> StepResult:
        """See `RunningStep.result`."""
        results: list[SampledRow | None] = [None] * self.num_rows
        if self.draw is not None:
            for index, sampled in zip(self.rows, self.draw.result(), strict=True):
                results[index] = sampled
        return StepResult(results)


class DeviceRunner:
    """The engine's runner on a device: an `engine.runner.protocol.OverlappingRunner`."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        sampler: LaunchingSampler,
        device: Device,
        stager: InputStager,
        ladder: DecodeLadder | None = None,
        *,
        has_side_stream: bool = True,
    ) -> None:
        """Without a `ladder` all steps are eager. Without a side stream slots change at once."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._attention = attention
        self._sampler = sampler
        self._device = device
        self._stager = stager
        self._ladder = ladder
        self._before = DeviceStep(0)
        """The step that was launched last."""
        self.projections = decoder.projections
        """Every projection of the model, with its adapter slots."""
        self._transfers = (
            AdapterTransfers(device, self._install, self._clear) if has_side_stream else None
        )

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> DeviceStep:
        """See `OverlappingRunner.launch`."""
        for slot in batch.cleared_slots:
            self.clear_slot(slot)
        self._kv_cache.copy_blocks(batch.block_copies)
        if not batch.rows:
            self._before = DeviceStep(0)
        elif self._ladder is not None and self._ladder.takes(batch.rows):
            self._before = self._launch_decode(self._ladder, batch)
        else:
            self._before = self._launch_ragged(batch)
        return self._before

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """See `Runner.execute`."""
        return self.launch(batch).result()

    def install_adapter(self, slot: int, weights: AdapterWeights) -> SlotTransfer | None:
        """See `Runner.install_adapter`; where there is a side stream, it is begun."""
        if self._ladder is not None and weights.is_uncommon:
            self._ladder.uncommon_slots.add(slot)
        if self._transfers is not None:
            return self._transfers.install(slot, weights)
        self._install(slot, weights)
        return None

    def clear_slot(self, slot: int) -> None:
        """See `Runner.clear_slot`."""
        if self._ladder is not None:
            self._ladder.uncommon_slots.discard(slot)
        if self._transfers is not None:
            self._transfers.clear(slot)
        else:
            self._clear(slot)

    def close(self) -> None:
        """Stop the thread of the transfers."""
        if self._transfers is not None:
            self._transfers.close()

    def _launch_decode(self, ladder: DecodeLadder, batch: ScheduledBatch) -> DeviceStep:
        before, follows = self._before, batch.follows

        def take_drawn(token_ids: Tensor, order: tuple[int, ...]) -> None:
            token_ids.copy_(self._drawn(before, [follows[index] for index in order]))

        order, compute = ladder.prepare(batch.rows, take_drawn if follows else None)
        return self._draw(batch.rows, order, compute())

    def _launch_ragged(self, batch: ScheduledBatch) -> DeviceStep:
        block_size, row_tile = self._kv_cache.block_size, self._decoder.row_tile
        inputs = build_batch_inputs(batch.rows, block_size, row_tile)
        placed = self._stager.place(inputs)
        if batch.follows:  # a decode, in which every row samples
            follows = [batch.follows[index] for index in inputs.logit_rows]
            placed.token_ids[: len(follows)].copy_(self._drawn(self._before, follows))
        self._kv_cache.clear_blocks(placed.fresh_blocks)
        logits = self._decoder.forward(placed, self._kv_cache, self._attention)
        return self._draw(batch.rows, inputs.logit_rows, logits)

    def _draw(
        self, rows: Sequence[ScheduledRow], order: tuple[int, ...], logits: Tensor
    ) -> DeviceStep:
        sampling: list[SamplingRow] = [row for i in order if (row := rows[i].sampling) is not None]
        if not sampling:
            return DeviceStep(len(rows))
        return DeviceStep(len(rows), order, self._sampler.launch(logits, sampling))

    def _drawn(self, before: DeviceStep, rows: Sequence[int]) -> Tensor:
        """Token ids, on the device, that the step before drew for its rows with these indices."""
        assert before.draw is not None
        place_of = {row: place for place, row in enumerate(before.rows)}
        places = np.array([place_of[row] for row in rows], dtype=np.int64)
        return before.draw.token_ids.index_select(0, self._device.send(places))

    def _install(self, slot: int, weights: AdapterWeights) -> None:
        for key, projection in self.projections.items():
            affine = weights.affines.get(key)
            projection.install(
                slot, weights.projections.get(key), affine and self._affine_there(affine)
            )
        embedding = weights.embedding
        self._decoder.embedding_lora.install(slot, embedding and self._embedding_there(embedding))
        own = weights.own
        self._decoder.own_weights.install(slot, own and self._own_there(own))

    def _clear(self, slot: int) -> None:
        for projection in self.projections.values():
            projection.clear(slot)
        self._decoder.embedding_lora.install(slot, None)
        self._decoder.own_weights.install(slot, None)

    def _affine_there(self, affine: ColumnAffine) -> ColumnAffine:
        parts: list[Any] = [
            part if part is None else self._there(part) for part in (affine.scale, affine.shift)
        ]
        return ColumnAffine(*parts)

    def _embedding_there(self, lora: EmbeddingLora) -> EmbeddingLora:
        return replace(lora, a=self._there(lora.a), b=self._there(lora.b))

    def _own_there(self, own: OwnWeights) -> OwnWeights:
        norms = {path: self._there(weight) for path, weight in own.norms.items()}
        ends = [
            end if end is None else self._there(end) for end in (own.embedding, own.output_layer)
        ]
        return OwnWeights(norms, *ends)

    def _there(self, values: Tensor) -> Tensor:
        # As bytes: NumPy has no bfloat16.
        sent = self._device.send(values.contiguous().view(torch.uint8).numpy())
        return sent.view(values.dtype)
