"""Copies a ragged step's inputs to the device: one copy for the model, one for the adapters."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from engine.device.device import Device
from engine.runner.batch_inputs import BatchInputs
from lora_kernels import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch


class InputStager:
    """Belongs to one runner: its adapter batches are reused by one step after another."""

    def __init__(self, device: Device, lora: DeviceLoraBatch, logit_lora: DeviceLoraBatch) -> None:
        """`lora` has room for a step's tokens, `logit_lora` for its rows; neither is static."""
        self._device = device
        self._lora = lora
        self._logit_lora = logit_lora

    def place(self, inputs: BatchInputs) -> BatchInputs:
        """Queue the copies. What attention plans with stays on the host; it sends that itself."""
        parts = [
            tensor.numpy()
            for tensor in (
                inputs.token_ids,
                inputs.positions,
                inputs.slot_mapping,
                inputs.fresh_blocks,
                inputs.logit_tokens,
            )
        ]
        sent = self._device.send(np.concatenate(parts))
        bounds = pairwise(accumulate(map(len, parts), initial=0))
        token_ids, positions, slot_mapping, fresh, logit_tokens = (
            sent[begin:end] for begin, end in bounds
        )
        placed = replace(
            inputs,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            fresh_blocks=fresh,
            logit_tokens=logit_tokens,
        )
        assert isinstance(inputs.lora, LoraBatch)
        if inputs.lora.is_empty:
            return placed
        self._lora.update(inputs.lora)
        placed = replace(placed, lora=self._lora)
        num_logits = len(inputs.logit_slots)
        if num_logits == inputs.num_tokens:
            return placed
        self._logit_lora.update(LoraBatch.from_runs(inputs.logit_slots, [1] * num_logits))
        return replace(placed, logit_lora=self._logit_lora)
