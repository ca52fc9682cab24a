"""Finding stop strings in text that is still growing."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Where a stop string lies in a text: text[start:end] == stop."""

    stop: str
    start: int
    end: int


class StopStrings:
    """A choice's stop strings.

    The match that begins first wins; of several that begin at the same place, the shortest. That is
    what a search through the finished text would find. Streaming finds the same, because a match
    counts only once no earlier one can still complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))

    def __bool__(self) -> bool:
        return bool(self._stops)

    def find(self, text: str, ends_after: int = 0) -> StopMatch | None:
        """The first match of those that end after the index `ends_after`."""
        best: StopMatch | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, ends_after - len(stop) + 1))
            if start >= 0 and (best is None or (start, len(stop)) < (best.start, len(best.stop))):
                best = StopMatch(stop, start, start + len(stop))
        return best

    def undecided_from(self, text: str) -> int:
        """Where the first match that may still complete begins; len(text) if there is none."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < first:
                if stop.startswith(text[start:]):
                    first = start
                start = text.find(stop[0], start + 1)
        return first
