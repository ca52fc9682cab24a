"""Adapters in host memory: how far each has come, what they weigh, and which may go."""

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


class HostWeights(Protocol):
    """Weights in host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        ...


class HostState(enum.Enum):
    """How far an adapter has come; see `engine.adapters.host`."""

    NEEDED = "needed"
    DEFERRED = "deferred"
    READING = "reading"
    READY = "ready"


@dataclass(slots=True, eq=False)
class HostEntry:
    """An adapter that is in host memory, or on its way there."""

    digest: str
    since: float
    state: HostState = HostState.NEEDED
    wanted: bool = True
    """Whether a sequence wants it, or it is pinned."""
    refetched: bool = False
    """Whether its files were damaged or missing once, and have been asked for again."""
    is_hastened: bool = False
    """Whether it is about to fill a slot: then it is read as soon as its files are there, past the
    limits if need be."""
    num_bytes: int = 0
    weights: HostWeights | None = None


class HostMemory:
    """At most `max_loras` adapters with `max_bytes` in all; a larger one is still held, alone.

    Adapters being read count. Those that are idle go, least recently used first, for others.
    """

    def __init__(self, max_loras: int, max_bytes: int) -> None:
        self.entries: dict[str, HostEntry] = {}
        self.kept: frozenset[str] = frozenset()
        """Digests that stay whether or not they are wanted."""
        self.num_held = 0
        """Entries that are ready or being read; `held_bytes` are their bytes."""
        self.held_bytes = 0
        self.num_reading = 0
        """Entries that are being read."""
        self._max_loras = max_loras
        self._max_bytes = max_bytes
        self._idle: OrderedDict[str, HostEntry] = OrderedDict()
        """Ready and not needed, least recently used first."""

    def is_needed(self, entry: HostEntry) -> bool:
        """Whether an adapter must stay: it is wanted or kept."""
        return entry.wanted or entry.digest in self.kept

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more adapter fits."""
        return self._fits(1, num_bytes)

    def make_room(self, num_bytes: int) -> bool:
        """Evict what is idle until one more adapter fits; False if it does not even then."""
        self._evict(1, num_bytes)
        return self._fits(1, num_bytes)

    def trim(self) -> None:
        """Evict idle adapters until the limits hold."""
        self._evict(0, 0)

    def begin_read(self, entry: HostEntry) -> None:
        """An adapter is being read; it counts from now on."""
        entry.state = HostState.READING
        self.num_reading += 1
        self.num_held += 1
        self.held_bytes += entry.num_bytes

    def read_failed(self, entry: HostEntry) -> None:
        """A read failed: the adapter no longer counts; the caller decides what becomes of it."""
        self.num_reading -= 1
        self.num_held -= 1
        self.held_bytes -= entry.num_bytes
        entry.num_bytes = 0

    def read_done(self, entry: HostEntry, weights: HostWeights) -> None:
        """A read succeeded: hold the weights, and count their real size."""
        self.num_reading -= 1
        self.held_bytes += weights.nbytes - entry.num_bytes
        entry.num_bytes = weights.nbytes
        entry.weights = weights
        entry.state = HostState.READY
        self.settle(entry)

    def settle(self, entry: HostEntry) -> None:
        """List the entry as idle, or not, after it became needed or stopped being needed."""
        if entry.state is HostState.READY and not self.is_needed(entry):
            self._idle[entry.digest] = entry
        else:
            self._idle.pop(entry.digest, None)

    def note_use(self, digest: str) -> None:
        """Make an idle adapter the last one to be evicted."""
        if digest in self._idle:
            self._idle.move_to_end(digest)

    def drop(self, digest: str) -> None:
        """Forget an adapter, however far it has come."""
        entry = self.entries.pop(digest, None)
        if entry is None:
            return
        self._idle.pop(digest, None)
        if entry.state is HostState.READING:
            self.num_reading -= 1
        if entry.state in (HostState.READING, HostState.READY):
            self.num_held -= 1
            self.held_bytes -= entry.num_bytes

    def _fits(self, num_more: int, more_bytes: int) -> bool:
        if self.num_held == 0:
            return True  # an adapter larger than the limit is still served, alone
        return (
            self.num_held + num_more <= self._max_loras
            and self.held_bytes + more_bytes <= self._max_bytes
        )

    def _evict(self, num_more: int, more_bytes: int) -> None:
        while self._idle and not self._fits(num_more, more_bytes):
            self.drop(next(iter(self._idle)))

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts and lists disagree."""
        states = (HostState.READING, HostState.READY)
        held = [entry for entry in self.entries.values() if entry.state in states]
        reading = [entry for entry in held if entry.state is HostState.READING]
        assert len(reading) == self.num_reading, "reads miscounted"
        assert len(held) == self.num_held, "held adapters miscounted"
        assert sum(entry.num_bytes for entry in held) == self.held_bytes, "bytes miscounted"
        for digest, entry in self.entries.items():
            is_idle = entry.state is HostState.READY and not self.is_needed(entry)
            assert (digest in self._idle) == is_idle, f"{digest[:12]} wrongly (not) idle"
            assert (entry.weights is None) == (entry.state is not HostState.READY)
        assert self._idle.keys() <= self.entries.keys(), "an idle adapter is unknown"
