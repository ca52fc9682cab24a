"""A runner whose model says random things, drawn by the real sampler: for what holds a reply."""

import hashlib

import torch

from engine.sampling.sampler import Sampler
from engine.scheduled_batch import SampledRow, ScheduledBatch, StepResult


class RandomRunner:
    """An `engine.runner.protocol.Runner`; a row's logits are a function of its tokens alone."""

    def __init__(self, sampler: Sampler, vocab_size: int) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size

    def execute(self, batch: ScheduledBatch) -> StepResult:
        rows: list[SampledRow | None] = []
        for row in batch.rows:
            if row.sampling is None:
                rows.append(None)
                continue
            history = hashlib.sha256(repr(list(row.sampling.token_ids)).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(history[:7], "little"))
            logits = torch.randn(1, self._vocab_size, generator=generator)
            rows += self._sampler.sample(logits, [row.sampling])
        return StepResult(rows)

    def install_adapter(self, slot: int, weights: object) -> None:
        pass

    def clear_slot(self, slot: int) -> None:
        pass
