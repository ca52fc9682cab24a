"""A step's inputs on their way to a device: the same values, in as few copies as may be."""

from random import Random
from typing import Any

import numpy as np
import torch

from engine.device.device import HostDevice
from engine.device.setup import interpreter_setup
from engine.device.staging import InputStager
from engine.runner.batch_inputs import build_batch_inputs
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow, ScheduledRow
from lora_kernels import LoraBatch


class CountingDevice(HostDevice):
    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def send(self, values: Any) -> torch.Tensor:
        self.num_copies += 1
        return super().send(values)


def stager_of(device: HostDevice) -> InputStager:
    setup = interpreter_setup(max_loras=3, max_lora_rank=8)
    return InputStager(
        device, setup.ragged_batch(64, torch.float32), setup.ragged_batch(16, torch.float32)
    )


def random_rows(random: Random) -> list[ScheduledRow]:
    rows: list[ScheduledRow] = []
    for number in range(random.randrange(1, 8)):
        start, length = random.randrange(40), random.choice([1, 1, 1, 7])
        sampling = SamplingRow(SamplingParams(max_tokens=1, seed=0), (0,), [], 0)
        rows.append(
            ScheduledRow(
                number,
                [random.randrange(99) for _ in range(length)],
                start,
                [random.randrange(50) for _ in range(-(-(start + length) // 16))],
                random.choice([None, None, 0, 1, 2]),
                sampling if random.random() < 0.8 else None,
            )
        )
    return rows


def segments(batch: Any) -> list[tuple[int, list[int]]]:
    """(slot, rows) of each segment."""
    bounds = batch.segment_indptr
    return [
        (slot, batch.permutation[bounds[i] : bounds[i + 1]].tolist())
        for i, slot in enumerate(batch.segment_slot)
    ]


def test_what_arrives_is_what_was_laid_out_in_one_copy_a_step():
    device, random = CountingDevice(), Random(5)
    stager = stager_of(device)
    with_logit_batch = 0
    for step in range(60):
        inputs = build_batch_inputs(random_rows(random), 16)
        placed = stager.place(inputs)
        assert device.num_copies == step + 1
        for name in ("token_ids", "positions", "slot_mapping", "fresh_blocks", "logit_tokens"):
            assert torch.equal(getattr(placed, name), getattr(inputs, name)), name
        for name in ("query_start_loc", "starts", "block_tables"):
            assert np.array_equal(getattr(placed, name), getattr(inputs, name)), name
        assert placed.lora.is_empty == inputs.lora.is_empty
        if inputs.lora.is_empty:
            continue
        assert segments(placed.lora) == segments(inputs.lora)
        if placed.logit_lora is not None:
            with_logit_batch += 1
            slots = inputs.logit_slots
            assert segments(placed.logit_lora) == segments(
                LoraBatch.from_runs(slots, [1] * len(slots))
            )
        else:
            assert len(inputs.logit_slots) == inputs.num_tokens
    assert with_logit_batch > 10


def test_a_step_that_is_staged_takes_nothing_of_the_one_before():
    stager, random = stager_of(HostDevice()), Random(2)
    first = stager.place(build_batch_inputs(random_rows(random), 16))
    kept = first.token_ids.clone(), first.positions.clone()
    stager.place(build_batch_inputs(random_rows(random), 16))
    assert torch.equal(first.token_ids, kept[0]) and torch.equal(first.positions, kept[1])
