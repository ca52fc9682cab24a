"""Weighted virtual token counters on one level: over tenants, or over one tenant's queues.

The algorithm is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024), used twice. Service is charged to a counter, divided by its weight; whoever
waits with the smallest counter is served next. Whoever begins to wait is lifted to the smallest
counter of those who wait already, so that idling earns no credit; if nobody waits, to the counter
of the last one who did.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from engine.scheduling.counter_heap import CounterHeap


class HasCounter(Hashable, Protocol):
    """What competes: a tenant or a queue."""

    counter: float


C = TypeVar("C", bound=HasCounter)


class Contenders(Generic[C]):
    """Who waits on one level, and the floor that newcomers are lifted to. Never lowers a counter.

    The floor never falls. So an idle member whose counter is not above it can be forgotten without
    loss: created anew, it would be lifted to the floor anyway. `is_idle` says who is idle.
    """

    def __init__(self, is_idle: Callable[[C], bool]) -> None:
        self._is_idle = is_idle
        self._waiting = CounterHeap[C](key=_counter)
        self._resting = CounterHeap[C](key=_counter)
        self._last_leaver: C | None = None

    @property
    def floor(self) -> float:
        """The smallest counter of those who wait; with nobody waiting, the last leaver's."""
        lowest = self._waiting.min()
        if lowest is None:
            lowest = self._last_leaver
        return 0.0 if lowest is None else lowest.counter

    def enter(self, member: C) -> None:
        """Begin to wait."""
        if member not in self._waiting:
            member.counter = max(member.counter, self.floor)
            self._waiting.push(member)

    def leave(self, member: C) -> None:
        """Stop waiting: everything is admitted or gone, or a quota holds the member back."""
        if member in self._waiting:
            self._waiting.discard(member)
            self._last_leaver = member

    def rest(self, member: C) -> None:
        """Remember an idle member for as long as its counter matters."""
        self._resting.push(member)

    def forgettable(self) -> Iterator[C]:
        """Idle members that may be forgotten, each named once. Amortised O(log n) for each."""
        while (member := self._resting.min()) is not None:
            if member.counter > self.floor:
                return
            self._resting.discard(member)
            if self._is_idle(member):
                yield member


def _counter(member: HasCounter) -> tuple[float, int]:
    return member.counter, 0
