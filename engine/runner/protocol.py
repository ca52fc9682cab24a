"""What runs the scheduler's batches, as the engine core sees it: protocols, no tensors.

Implemented by `engine.runner.model_runner` (CPU), `engine.device.device_runner` (GPU), and
`engine.runner.overlapped_runner`, which wraps either kind of step in a thread of its own.
"""

from collections.abc import Callable
from typing import Any, Protocol

from engine.scheduled_batch import ScheduledBatch, StepResult


class RunningStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return what it drew; raises whatever the step raised."""
        ...


class Transfer(Protocol):
    """The copy of an adapter's weights into its slot, which goes on beside running steps."""

    def is_done(self) -> bool:
        """Whether the copy has ended, successfully or not; never waits."""
        ...

    def error(self) -> str | None:
        """Why the copy failed; None if the slot holds the adapter. Call it only once done."""
        ...


class Runner(Protocol):
    """The side that holds every tensor: the model, its KV cache and the adapter slots."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: block copies, one forward pass, sampling.

        The core changes slots beforehand, through the methods below, and passes a batch whose
        `cleared_slots` and `loads` are empty.
        """
        ...

    def install_adapter(self, slot: int, weights: Any) -> Transfer | None:
        """Put weights into an empty slot. Called between steps, so it must be quick.

        A runner that needs longer starts the copy and returns a `Transfer`; rows may use the slot
        once that is done. Whatever this raises ends the requests of this adapter and no others.
        """
        ...

    def clear_slot(self, slot: int) -> None:
        """Forget a slot's weights; harmless if it has none."""
        ...


Launch = Callable[[ScheduledBatch], RunningStep]
"""The `launch` of an `OverlappingRunner`."""


class OverlappingRunner(Runner, Protocol):
    """A runner that accepts a step while the one before it still runs."""

    def launch(self, batch: ScheduledBatch) -> RunningStep:
        """Queue a step behind those launched before and return at once; otherwise like `execute`.

        Slots are changed, and steps without `follows` are launched, only while no step runs.
        """
        ...
