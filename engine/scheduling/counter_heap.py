"""A priority queue for keys that grow while they wait, which is what fairness counters do."""

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[float, int]
"""(counter, arrival number): the oldest only breaks ties."""


class CounterHeap(Generic[T]):
    """Members in the order of a key that mostly grows.

    A key that grows needs no notice: its entry is a lower bound, renewed when it surfaces. So
    charging a token costs nothing here. A key that *falls* must be pushed again.
    """

    def __init__(self, key: Callable[[T], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, T]] = []
        self._live: dict[T, int] = {}  # member -> number of its only valid entry
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, member: T) -> bool:
        return member in self._live

    def push(self, member: T) -> None:
        """Add a member, or note that its key fell."""
        self._num_pushes += 1
        self._live[member] = self._num_pushes
        heappush(self._heap, (self._key(member), self._num_pushes, member))
        if len(self._heap) > 2 * len(self._live) + 16:
            self._compact()

    def discard(self, member: T) -> None:
        """Take a member out, if it is one."""
        self._live.pop(member, None)

    def min(self) -> T | None:
        """The member with the smallest key; None if there is none."""
        heap = self._heap
        while heap:
            key, number, member = heap[0]
            if self._live.get(member) != number:
                heappop(heap)
            elif (grown := self._key(member)) > key:
                heapreplace(heap, (grown, number, member))
            else:
                return member
        return None

    def _compact(self) -> None:
        self._heap = [(self._key(member), number, member) for member, number in self._live.items()]
        heapify(self._heap)
