"""Runs scheduled batches: tensors on this side, decisions on the scheduler's."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.adapter_weights import AdapterWeights
from engine.scheduled_batch import SampledRow, SamplingRow, ScheduledBatch, StepResult


class RowSampler(Protocol):
    """Draws tokens from logits, a row of logits for each sampling row."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """`logits` is [len(rows), vocab], in the model's dtype."""
        ...


class ModelRunner:
    """Executes batches on one model. See `engine.adapter_source.Runner`."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: clear slots, copy blocks, one forward pass, sampling."""
        raise NotImplementedError

    def install_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Put weights into a slot that no row of the next batch uses."""
        raise NotImplementedError

    def clear_slot(self, slot: int) -> None:
        """Forget a slot's weights."""
        raise NotImplementedError
