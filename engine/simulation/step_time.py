"""How long a step takes on a simulated machine."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.scheduled_batch import ScheduledBatch
from engine.simulation.step_load import StepLoad


class StepTime(Protocol):
    """A machine, as far as the scheduler can tell."""

    def __call__(self, batch: ScheduledBatch) -> float:
        """Seconds that this batch, which has rows, takes."""
        ...


@runtime_checkable
class LoadTime(StepTime, Protocol):
    """A machine to which two steps of equal load are equal: the batch need not be built."""

    def seconds(self, load: StepLoad) -> float:
        """Seconds that a batch of this load takes."""
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
        return self.seconds(StepLoad.of(batch))

    def seconds(self, load: StepLoad) -> float:
        """See `LoadTime`."""
        num_more_tokens = load.num_tokens - load.num_rows
        return self.base + self.per_row * load.num_rows + self.per_prefill_token * num_more_tokens
