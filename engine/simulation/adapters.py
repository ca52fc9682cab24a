"""An adapter source whose loads take simulated time."""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush

from engine.adapters.source import AdapterEvent, AdapterFailed, AdapterReady


class SimulatedAdapters:
    """An `AdapterSource`: `num_readers` load at a time, the others wait in the order of asking.

    `load_seconds(digest)` says how long a load takes; None, that it fails at once. Host memory
    holds all adapters that are wanted and the `capacity` most recently used of the others.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        load_seconds: Callable[[str], float | None],
        capacity: int = 32,
        num_readers: int = 4,
    ) -> None:
        self._clock = clock
        self._load_seconds = load_seconds
        self._capacity = capacity
        self._num_readers = num_readers
        self._in_host = OrderedDict[str, None]()  # least recently used first
        self._wanted: set[str] = set()
        self._waiting = OrderedDict[str, float]()  # asked for, and when; not begun
        self._loading = dict[str, float]()  # begun: when it was asked for
        self._ends: list[tuple[float, str]] = []  # a heap
        self._events: list[AdapterEvent] = []
        self.num_loads = 0

    @property
    def next_event_at(self) -> float | None:
        """When `poll` will have something to tell; None if nothing is on its way."""
        if self._events:
            return self._clock()
        return self._ends[0][0] if self._ends else None

    def prefetch(self, digest: str) -> None:
        """See `AdapterSource`."""
        self._wanted.add(digest)
        if digest in self._in_host:
            self._in_host.move_to_end(digest)
            self._events.append(AdapterReady(digest, 0.0))
        elif digest not in self._loading and digest not in self._waiting:
            self._waiting[digest] = self._clock()
            self._begin()

    def poll(self) -> list[AdapterEvent]:
        """See `AdapterSource`."""
        now = self._clock()
        has_loaded = False
        while self._ends and self._ends[0][0] <= now:
            _, digest = heappop(self._ends)
            asked_at = self._loading.pop(digest)
            self._in_host[digest] = None
            self._events.append(AdapterReady(digest, now - asked_at))
            self.num_loads += 1
            self._begin()
            has_loaded = True
        if has_loaded:
            self._evict()
        events, self._events = self._events, []
        return events

    def hasten(self, digest: str) -> None:
        """See `AdapterSource`."""
        if digest in self._waiting:
            self._waiting.move_to_end(digest, last=False)

    def get(self, digest: str) -> str | None:
        """See `AdapterSource`; the digest stands for the weights."""
        if digest not in self._in_host:
            return None
        self._in_host.move_to_end(digest)
        return digest

    def release(self, digest: str) -> None:
        """See `AdapterSource`."""
        self._wanted.discard(digest)
        self._waiting.pop(digest, None)
        self._evict()

    def forget(self, digest: str) -> None:
        """See `AdapterSource`."""
        self._wanted.discard(digest)
        self._in_host.pop(digest, None)

    def _begin(self) -> None:
        while self._waiting and len(self._loading) < self._num_readers:
            digest, asked_at = self._waiting.popitem(last=False)
            seconds = self._load_seconds(digest)
            if seconds is None:
                self._events.append(AdapterFailed(digest, "it cannot be read"))
                continue
            self._loading[digest] = asked_at
            heappush(self._ends, (self._clock() + seconds, digest))

    def _evict(self) -> None:
        num_idle = len(self._in_host) - sum(digest in self._in_host for digest in self._wanted)
        if num_idle <= self._capacity:
            return
        for digest in [d for d in self._in_host if d not in self._wanted]:
            if num_idle <= self._capacity:
                return
            del self._in_host[digest]
            num_idle -= 1
