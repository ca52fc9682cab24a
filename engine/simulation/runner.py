"""A runner that computes nothing: it lets time pass, and draws tokens that end nothing early."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.scheduled_batch import (
    SampledRow,
    SampledToken,
    SamplingRow,
    ScheduledBatch,
    StepResult,
)
from engine.simulation.step_time import StepTime

TokenScript = Callable[[SamplingRow], int]
"""Chooses the next token of a row, for example an EOS id to end a reply."""

FILLER_TOKEN_ID = 1


class SimulatedClock:
    """Seconds since the start; the simulation moves it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


class SimulatedRunner:
    """A `Runner`: a step takes `step_time(batch)`, an install `install_seconds`.

    Without a script every token is `FILLER_TOKEN_ID`, so that a reply ends at its `max_tokens`.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        step_time: StepTime,
        *,
        script: TokenScript | None = None,
        install_seconds: float = 0.0,
        observe: Callable[[ScheduledBatch], None] | None = None,
    ) -> None:
        self._clock = clock
        self.step_time = step_time
        self._script = script
        self._install_seconds = install_seconds
        self._observe = observe
        self._fillers: dict[int, SampledRow] = {}
        self.num_rows = 0
        self.num_steps = 0
        self.installs = Counter[str]()
        """By digest."""
        self.slots: dict[int, str] = {}
        """Digest by slot."""

    @property
    def num_installs(self) -> int:
        """Of all adapters."""
        return self.installs.total()

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """See `Runner`."""
        if self._observe is not None:
            self._observe(batch)
        self.count(1, len(batch.rows))
        self._clock.now += self.step_time(batch)
        sample = self._filler if self._script is None else self._scripted
        return StepResult(
            [None if row.sampling is None else sample(row.sampling) for row in batch.rows]
        )

    def count(self, num_steps: int, num_rows: int) -> None:
        """Steps that were taken, with so many rows in all."""
        self.num_steps += num_steps
        self.num_rows += num_rows

    def install_adapter(self, slot: int, weights: Any) -> None:
        """See `Runner`."""
        self.installs[weights] += 1
        self.slots[slot] = weights
        self._clock.now += self._install_seconds

    def clear_slot(self, slot: int) -> None:
        """See `Runner`."""
        self.slots.pop(slot, None)

    def _filler(self, row: SamplingRow) -> SampledRow:
        num_choices = len(row.choices)
        drawn = self._fillers.get(num_choices)
        if drawn is None:
            drawn = SampledRow((SampledToken(FILLER_TOKEN_ID),) * num_choices)
            self._fillers[num_choices] = drawn
        return drawn

    def _scripted(self, row: SamplingRow) -> SampledRow:
        assert self._script is not None
        return SampledRow((SampledToken(self._script(row)),) * len(row.choices))
