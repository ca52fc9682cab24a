"""The last records of a kind, for any number of readers."""

from collections import deque
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Slice(NamedTuple, Generic[T]):
    """What a reader gets of a ring."""

    records: list[T]
    """The oldest first."""
    position: int
    """To go on from."""
    missed: int
    """Records that were overwritten between the reader's position and the first of `records`."""
    has_more: bool


class Ring(Generic[T]):
    """Keeps the last `size` records; a position in it is how many there were before."""

    __slots__ = ("_records", "_total")

    def __init__(self, size: int) -> None:
        self._records = deque[T](maxlen=size)
        self._total = 0

    def push(self, record: T) -> None:
        """Keep a record, and forget the oldest one where there are too many."""
        self._records.append(record)
        self._total += 1

    def read(self, position: int, limit: int) -> Slice[T]:
        """At most `limit` records from a position on; one that lies ahead counts as now."""
        oldest = self._total - len(self._records)
        start = min(max(position, oldest), self._total)
        end = min(start + limit, self._total)
        records = list(islice(self._records, start - oldest, end - oldest))
        return Slice(records, end, max(0, oldest - position), end < self._total)
