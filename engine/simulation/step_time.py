"""How long a step takes on a simulated machine."""

from dataclasses import dataclass
from typing import Protocol

from engine.scheduled_batch import ScheduledBatch


class StepTime(Protocol):
    """A machine, as far as the scheduler can tell."""

    def __call__(self, batch: ScheduledBatch) -> float:
        """Seconds that this batch, which has rows, takes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepTime:
    """`base + per_row x rows + per_prefill_token x (tokens - rows)`: weights are read once a step,
    and every row and further token adds its share. Seconds.
    """

    base: float = 0.02
    per_row: float = 0.001
    per_prefill_token: float = 0.0006

    def __call__(self, batch: ScheduledBatch) -> float:
        """See `StepTime`."""
        num_rows = len(batch.rows)
        num_more_tokens = batch.num_tokens - num_rows
        return self.base + self.per_row * num_rows + self.per_prefill_token * num_more_tokens
