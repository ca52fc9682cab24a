"""Greedy decoding of a few prompts on a runner, without a scheduler: for checks of exactness."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.runner.protocol import Runner
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import (
    SampledRow,
    SampledToken,
    SamplingRow,
    ScheduledBatch,
    ScheduledRow,
)


class RecordingSampler:
    """Takes the largest logit, and keeps each step's logits by the seed of the row's parameters."""

    def __init__(self) -> None:
        self.logits: dict[int, Tensor] = {}

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """See `engine.sampling.launched.RowSampler`."""
        self.logits = {
            row.params.seed or 0: values.clone()
            for row, values in zip(rows, logits.to(torch.float32), strict=True)
        }
        return [SampledRow((SampledToken(int(values.argmax())),)) for values in logits]


@dataclass(frozen=True, slots=True)
class GreedyRun:
    """One prompt's continuation; end-of-sequence tokens do not end it."""

    token_ids: list[int]
    logits: Tensor
    """[max_tokens, vocab_size] float32."""


@dataclass(slots=True)
class _Sequence:
    index: int
    prompt: list[int]
    slot: int | None
    block_table: list[int]
    output: list[int] = field(default_factory=list[int])
    logits: list[Tensor] = field(default_factory=list[Tensor])


def blocks_for(num_sequences: int, num_tokens: int, block_size: int = 16) -> int:
    """KV blocks that so many sequences of so many tokens need."""
    return num_sequences * -(-num_tokens // block_size)


def greedy_runs(
    runner: Runner,
    sampler: RecordingSampler,
    prompts: Sequence[tuple[Sequence[int], int | None]],
    max_tokens: int,
    *,
    block_size: int = 16,
) -> list[GreedyRun]:
    """Decode (prompt, adapter slot) pairs together, from block 0 on.

    `sampler` is the runner's. The runner's cache has `blocks_for` blocks of the longest at least.
    """
    longest = max(len(prompt) for prompt, _ in prompts) + max_tokens
    each = blocks_for(1, longest, block_size)
    sequences = [
        _Sequence(i, list(prompt), slot, list(range(i * each, (i + 1) * each)))
        for i, (prompt, slot) in enumerate(prompts)
    ]
    for _ in range(max_tokens):
        result = runner.execute(ScheduledBatch(rows=[_row(s, block_size) for s in sequences]))
        for sequence, sampled in zip(sequences, result.rows, strict=True):
            assert sampled is not None
            sequence.output.append(sampled.tokens[0].token_id)
            sequence.logits.append(sampler.logits[sequence.index])
    return [GreedyRun(s.output, torch.stack(s.logits)) for s in sequences]


def _row(sequence: _Sequence, block_size: int) -> ScheduledRow:
    token_ids = sequence.prompt + sequence.output
    start = len(token_ids) - 1 if sequence.output else 0
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=sequence.index)
    return ScheduledRow(
        sequence_id=sequence.index,
        token_ids=token_ids[start:],
        start=start,
        block_table=sequence.block_table[: -(-len(token_ids) // block_size)],
        slot=sequence.slot,
        sampling=SamplingRow(params, (0,), token_ids, len(sequence.prompt)),
    )
