"""What the scheduler side tells whoever watches it, as it happens."""

from typing import TYPE_CHECKING, Protocol

from engine.telemetry.records import SlotEventKind

if TYPE_CHECKING:
    from engine.scheduling.request import Request


class Observer(Protocol):
    """Called in the middle of a step, so it must be quick and change nothing."""

    def admitted(self, request: "Request", now: int) -> None:
        """A sequence of the request begins to run, again or for the first time. `now`: ns."""
        ...

    def request_over(self, request: "Request", now: int) -> None:
        """The last sequence of a request has left the scheduler. `now`: ns."""
        ...

    def slot_changed(self, kind: SlotEventKind, digest: str, slot: int | None) -> None:
        """An adapter's state changed, on its way into a slot or out of it."""
        ...
