"""The scheduler's time: integer nanoseconds, one instant for each call into the scheduler."""

from collections.abc import Callable


class StepClock:
    """Reads the injected clock once a call, so that all that happens in a call is simultaneous.

    Integers, because parts of a wait must sum to the whole exactly. Never runs backwards.
    """

    __slots__ = ("_clock", "now")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now = round(clock() * 1e9)
        """The current instant, in nanoseconds."""

    def tick(self) -> None:
        """Read the clock (seconds) again."""
        self.now = max(self.now, round(self._clock() * 1e9))
