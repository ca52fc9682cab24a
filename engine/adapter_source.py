"""Where adapter weights come from, as the engine core sees it.

The core never reads a file: it asks a source to bring an adapter to host memory, polls for what
arrived, and hands the weights to the runner when the scheduler has given the adapter a slot.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from engine.scheduled_batch import ScheduledBatch, StepResult


class AdapterReady(NamedTuple):
    """The weights of `digest` are in host memory."""

    digest: str
    seconds: float
    """How long it took, from the first `prefetch` on."""


class AdapterFailed(NamedTuple):
    """The weights of `digest` cannot be had; a later `prefetch` tries again."""

    digest: str
    reason: str


AdapterEvent = AdapterReady | AdapterFailed


class AdapterSource(Protocol):
    """Adapters in host memory, by digest. No method blocks; all are called between steps."""

    def prefetch(self, digest: str) -> None:
        """Somebody wants this adapter: start to bring it to host memory. Idempotent.

        Answered by an event, also where the weights are there already.
        """
        ...

    def poll(self) -> Sequence[AdapterEvent]:
        """What arrived or failed since the last call, in order."""
        ...

    def hasten(self, digest: str) -> None:
        """An adapter that was prefetched has a slot to fill: it goes before others, past limits.

        Nothing where it is in host memory.
        """
        ...

    def get(self, digest: str) -> Any | None:
        """The weights if they are in host memory; counts as a use for the LRU order."""
        ...

    def release(self, digest: str) -> None:
        """No sequence wants this adapter any more: it may be evicted, least recently used first."""
        ...

    def forget(self, digest: str) -> None:
        """Drop the adapter for good; called once no sequence wants it and no slot holds it."""
        ...


class RunningStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """What it drew, once it is over; raises what the step raised."""
        ...


class Transfer(Protocol):
    """An adapter's way into its slot, beside the steps that run."""

    def is_done(self) -> bool:
        """Whether it is over; never waits."""
        ...

    def error(self) -> str | None:
        """Once it is over: why the slot does not hold the adapter; None: it does."""
        ...


class Runner(Protocol):
    """The side that holds every tensor."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: block copies, one forward pass, sampling.

        Slots were changed before, by the methods below: the batch has no `cleared_slots` or
        `loads` any more.
        """
        ...

    def install_adapter(self, slot: int, weights: Any) -> Transfer | None:
        """Put weights into an empty slot; cheap, for it runs between steps.

        Where that takes time, it is begun, and a row may use the slot once the transfer is done.
        Whatever it raises ends the requests of that adapter, and theirs only.
        """
        ...

    def clear_slot(self, slot: int) -> None:
        """Forget a slot's weights; harmless if it has none."""
        ...


class OverlappingRunner(Runner, Protocol):
    """A runner that is told of a step while the one before still runs."""

    def launch(self, batch: ScheduledBatch) -> RunningStep:
        """Queue a step behind those launched before, and return at once; else as `execute`.

        Slots are changed, and steps without `follows` are launched, only while no step runs.
        """
        ...
