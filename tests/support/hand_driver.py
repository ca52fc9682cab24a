"""Drives a runner without a scheduler: each step's batch is written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import (
    SampledRow,
    SampledToken,
    SamplingRow,
    ScheduledBatch,
    ScheduledRow,
    StepResult,
)


class GreedySampler:
    """Takes the largest logit, and keeps the logits of the last step."""

    def __init__(self, vocab_size: int = 0, eos_token_ids: Sequence[int] = ()) -> None:
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        assert len(logits) == len(rows)
        self.logits = logits.clone()
        return [SampledRow((SampledToken(int(row.argmax())),)) for row in logits]


@dataclass(eq=False)
class HandSequence:
    sequence_id: int
    prompt: list[int]
    slot: int | None
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """One [vocab] row for each token of the output."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_left(self) -> int:
        """Tokens to run before the next one can be drawn."""
        return len(self.token_ids) - self.num_computed


class HandDriver:
    """Allocates blocks from the highest id down, so that tables are neither sorted nor dense."""

    def __init__(self, runner: ModelRunner, sampler: GreedySampler, num_blocks: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._block_size = 16
        self._free = [*range(0, num_blocks, 2), *range(1, num_blocks, 2)]
        self._count = 0

    def add(self, prompt: Sequence[int], slot: int | None = None) -> HandSequence:
        self._count += 1
        return HandSequence(self._count, list(prompt), slot)

    def step(self, parts: Sequence[tuple[HandSequence, int]], **batch: list) -> StepResult:
        """Run the next so many tokens of each sequence; one that catches up draws a token."""
        rows = [self._row(sequence, count) for sequence, count in parts]
        result = self._runner.execute(ScheduledBatch(rows=rows, **batch))
        sampled = [s for (s, _), row in zip(parts, rows, strict=True) if row.sampling is not None]
        for (sequence, count), row in zip(parts, result.rows, strict=True):
            sequence.num_computed += count
            assert (row is not None) == (sequence in sampled)
            if row is not None:
                sequence.output.append(row.tokens[0].token_id)
        in_logit_order = sorted(sampled, key=lambda s: -1 if s.slot is None else s.slot)
        for sequence, logits in zip(in_logit_order, self._sampler.logits, strict=False):
            sequence.logits.append(logits)
        return result

    def generate(
        self, sequences: Sequence[HandSequence], max_tokens: int, *, chunk: int = 10_000
    ) -> list[list[int]]:
        """Run all to `max_tokens` output tokens, at most `chunk` tokens of each in a step."""
        while running := [s for s in sequences if len(s.output) < max_tokens]:
            self.step([(s, min(chunk, s.num_left)) for s in running])
        return [s.output for s in sequences]

    def preempt(self, sequence: HandSequence) -> None:
        """Take the blocks away; everything is recomputed."""
        self._free += sequence.blocks
        sequence.blocks = []
        sequence.num_computed = 0

    def share_prefix(self, source: HandSequence, target: HandSequence, num_blocks: int) -> None:
        """Give the target the source's first blocks, as a prefix hit does."""
        target.blocks = source.blocks[:num_blocks]
        target.num_computed = num_blocks * self._block_size

    def _row(self, sequence: HandSequence, count: int) -> ScheduledRow:
        start, end = sequence.num_computed, sequence.num_computed + count
        while len(sequence.blocks) * self._block_size < end:
            sequence.blocks.append(self._free.pop())
        token_ids = sequence.token_ids
        samples = end == len(token_ids)
        sampling = SamplingRow(
            SamplingParams(max_tokens=1, seed=0), (0,), token_ids, len(sequence.prompt)
        )
        return ScheduledRow(
            sequence_id=sequence.sequence_id,
            token_ids=token_ids[start:end],
            start=start,
            block_table=sequence.blocks[: -(-end // self._block_size)],
            slot=sequence.slot,
            sampling=sampling if samples else None,
        )
