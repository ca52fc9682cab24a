"""Asynchronous draws: what a step drew stays on the device until the host asks for it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.scheduled_batch import SampledRow, SamplingRow


class LaunchedDraw(Protocol):
    """Draws that were queued."""

    token_ids: Tensor
    """[rows] int64, on the device of the logits: the first token drawn for each row."""

    def result(self) -> list[SampledRow]:
        """Wait for the draws, and return them."""
        ...


class LaunchingSampler(Protocol):
    """Draws tokens without waiting for the device, where it can."""

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> LaunchedDraw:
        """Queue the draws of logits [len(rows), vocab_size]."""
        ...


class RowSampler(Protocol):
    """Draws tokens from logits, a row of logits for each sampling row."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """`logits` is [len(rows), vocab_size], in the model's dtype."""
        ...


class DrawnRows:
    """A `LaunchedDraw` that is done already."""

    def __init__(self, rows: list[SampledRow], device: torch.device) -> None:
        self._rows = rows
        first = [row.tokens[0].token_id if row.tokens else 0 for row in rows]
        self.token_ids = torch.tensor(first, dtype=torch.int64, device=device)

    def result(self) -> list[SampledRow]:
        """See `LaunchedDraw.result`."""
        return self._rows


class WaitingSampler:
    """A `LaunchingSampler` made of a `RowSampler`: launching it waits for the logits."""

    def __init__(self, sampler: RowSampler) -> None:
        self._sampler = sampler

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> DrawnRows:
        """See `LaunchingSampler.launch`."""
        return DrawnRows(self._sampler.sample(logits, rows), logits.device)
