"""How full a queue may get, and when to come back to a full one.

A refused client is told when to ask again. If the queue drains at r requests a second, the k-th
client refused in the last window is sent away for k / r seconds. So clients that obey come back
about as fast as room appears, and not all at once.
"""

from dataclasses import dataclass

WINDOW_NS = 10_000_000_000
"""Over which departures and refusals are counted."""
ASSUMED_RATE = 1.0
"""Requests a second that leave a queue of which nothing is known yet."""
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Congestion:
    """A full queue, as a refused client is told of it."""

    queued: int
    drain_per_second: float
    """Requests that left the queue in a second, on average over the last window."""
    retry_after: float
    """Seconds."""


class WindowCount:
    """Approximate number of events in the last window, in O(1).

    Counts the current fixed window, and of the one before it the share that the last window covers.
    """

    __slots__ = ("_began", "_count", "_first", "_previous")

    def __init__(self, now: int) -> None:
        self._first = self._began = now
        self._count = self._previous = 0

    def note(self, now: int) -> None:
        """Count an event. `now` in nanoseconds, never decreasing."""
        self._roll(now)
        self._count += 1

    def total(self, now: int) -> float:
        """Events in the last window."""
        self._roll(now)
        return self._count + self._previous * (1 - (now - self._began) / WINDOW_NS)

    def seconds(self, now: int) -> float:
        """How long was watched: a window, or since the first moment."""
        return min(now - self._first, WINDOW_NS) / 1e9

    def is_full_window(self, now: int) -> bool:
        """Whether a whole window was watched."""
        return now - self._first >= WINDOW_NS

    def _roll(self, now: int) -> None:
        windows = (now - self._began) // WINDOW_NS
        if windows:
            self._previous = self._count if windows == 1 else 0
            self._count = 0
            self._began += windows * WINDOW_NS


class Pressure:
    """How fast a queue drains while it is not empty, and how many requests it refuses."""

    __slots__ = ("_departures", "_known_rate", "_refusals")

    def __init__(self, now: int) -> None:
        self._departures = WindowCount(now)
        self._refusals = WindowCount(now)
        self._known_rate = ASSUMED_RATE

    def begin(self, now: int) -> None:
        """The queue was empty and no longer is: earlier departures do not count any more."""
        if rate := self._rate(now):
            self._known_rate = rate
        self._departures = WindowCount(now)

    def leave(self, now: int) -> None:
        """A sequence waits no more: it was admitted, or has ended."""
        self._departures.note(now)

    def refuse(self, queued: int, limit: int, now: int) -> Congestion:
        """A request is refused because `queued` wait, of at most `limit`."""
        self._refusals.note(now)
        rate = self._rate(now)
        ahead = queued - limit + self._refusals.total(now)
        # A queue that has just filled has not had the time to show how fast it drains.
        is_new = not rate and not self._departures.is_full_window(now)
        expected = self._known_rate if is_new else rate
        wait = ahead / expected if expected else MAX_RETRY_SECONDS
        return Congestion(queued, rate, min(max(wait, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS))

    def _rate(self, now: int) -> float:
        seconds = self._departures.seconds(now)
        return self._departures.total(now) / seconds if seconds else 0.0
