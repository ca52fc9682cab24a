"""Which adapter is in which device slot, and who needs it. Bookkeeping only, no weights.

    absent -> loading -> resident -> draining -> absent
                  \\-> absent, if the load failed: its requests end with an error

A slot is referenced by *sequences*, from their admission to their end or preemption. `wanted`
counts queued sequences as well. An adapter that nobody wants stays resident until its slot is
needed. A pinned adapter keeps its slot; until it has one it is known here and waits for it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Set
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from engine.scheduled_batch import SlotLoad
from engine.telemetry.observer import Observer
from engine.telemetry.records import SlotEventKind


class SlotState(Enum):
    """State of an adapter."""

    ABSENT = "absent"
    """No slot."""
    LOADING = "loading"
    """Its slot is assigned, its weights are not there yet."""
    RESIDENT = "resident"
    """Its sequences may be admitted."""
    DRAINING = "draining"
    """Its sequences run on and no more are admitted; then the slot goes to another adapter."""


class Adapter:
    """What is known of a digest, for as long as it is needed or has a slot."""

    __slots__ = (
        "digest", "is_claimed", "is_fetched", "is_hastened", "is_pinned", "is_unloading",
        "references", "slot", "state", "wanted",
    )  # fmt: skip

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.state = SlotState.ABSENT
        self.slot: int | None = None
        self.wanted = 0
        """Sequences queued or running."""
        self.references = 0
        """Sequences running."""
        self.is_fetched = False
        """Its weights have come to host memory since it became needed."""
        self.is_hastened = False
        """Its source was told to hurry; reset when it has a slot, or is no longer wanted."""
        self.is_claimed = False
        """A reservation waits for a slot on its behalf."""
        self.is_pinned = False
        """To have a slot, and to keep it, whether or not it is wanted."""
        self.is_unloading = False
        """To be dropped once nobody needs it."""

    @property
    def is_needed(self) -> bool:
        """Whether a sequence wants it, or it is pinned."""
        return self.wanted > 0 or self.is_pinned


class AdapterNotices(NamedTuple):
    """What the scheduler has to say to the adapters' source."""

    hastened: list[str]
    """Adapters to bring to host memory before all others: they are the next to get a slot."""
    released: list[str]
    """Adapters that nobody needs any more."""
    forgotten: list[str]
    """Adapters that were unloaded for good."""


class AdapterSlots:
    """At most `num_slots` adapters that are loading, resident or draining."""

    def __init__(self, num_slots: int, observer: Observer | None = None) -> None:
        self.num_slots = num_slots
        self._observer = observer
        self._adapters: dict[str, Adapter] = {}
        self._placed: dict[str, Adapter] = {}
        self._free = list(range(num_slots))  # a heap: the lowest slot first
        self._idle = OrderedDict[str, Adapter]()  # resident and not needed, longest idle first
        self._pinned: dict[str, Adapter] = {}
        self._cleared: list[int] = []
        self._loads: list[SlotLoad] = []
        self._hastened: list[str] = []
        self._released: list[str] = []
        self._forgotten: list[str] = []

    @property
    def placed(self) -> list[Adapter]:
        """Adapters that have a slot, the longest placed first."""
        return list(self._placed.values())

    @property
    def num_placed(self) -> int:
        """Slots that are not free."""
        return len(self._placed)

    @property
    def has_spare(self) -> bool:
        """Whether a slot is free, or holds an adapter that nobody needs."""
        return bool(self._free or self._idle)

    @property
    def has_notices(self) -> bool:
        """Whether the runner or the adapters' source is to be told something."""
        return bool(
            self._cleared or self._loads or self._hastened or self._released or self._forgotten
        )

    def find(self, digest: str) -> Adapter | None:
        """An adapter that is needed or has a slot."""
        return self._adapters.get(digest)

    def state(self, digest: str) -> SlotState:
        """State of any digest."""
        adapter = self._adapters.get(digest)
        return SlotState.ABSENT if adapter is None else adapter.state

    def want(self, digest: str) -> Adapter:
        """A sequence was queued."""
        adapter = self._adapters.setdefault(digest, Adapter(digest))
        adapter.wanted += 1
        self._idle.pop(digest, None)
        return adapter

    def unwant(self, digest: str) -> None:
        """A sequence ended."""
        adapter = self._adapters[digest]
        adapter.wanted -= 1
        if not adapter.wanted:
            adapter.is_hastened = False
            self._release_unneeded(adapter)

    def pin(self, digests: Set[str]) -> None:
        """Replace the set of pinned adapters, none of which may be draining."""
        for digest in self._pinned.keys() - digests:
            adapter = self._pinned.pop(digest)
            adapter.is_pinned = False
            self._release_unneeded(adapter)
        for digest in sorted(digests - self._pinned.keys()):
            adapter = self._adapters.setdefault(digest, Adapter(digest))
            assert adapter.state is not SlotState.DRAINING
            self._pinned[digest] = adapter
            adapter.is_pinned = True
            adapter.is_unloading = False
            self._idle.pop(digest, None)

    def next_pinned(self) -> str | None:
        """A pinned adapter in host memory that has no slot and no claim on one."""
        for digest, adapter in self._pinned.items():
            if adapter.state is SlotState.ABSENT and adapter.is_fetched and not adapter.is_claimed:
                return digest
        return None

    def fetched(self, digest: str) -> None:
        """An adapter's weights are in host memory; ignored if nobody needs it."""
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.is_needed:
            adapter.is_fetched = True

    def hasten(self, digest: str) -> None:
        """An absent adapter is the next to get a slot: tell its source to hurry."""
        adapter = self._adapters[digest]
        adapter.is_hastened = True
        self._hastened.append(digest)

    def acquire(self, digest: str) -> int:
        """A sequence begins to run; returns the slot. Only forks may join a draining adapter."""
        adapter = self._adapters[digest]
        assert adapter.state is SlotState.RESIDENT or adapter.references
        assert adapter.slot is not None
        adapter.references += 1
        return adapter.slot

    def release(self, digest: str) -> None:
        """A sequence stopped running. The last one to leave a draining adapter vacates its slot."""
        adapter = self._adapters[digest]
        adapter.references -= 1
        if adapter.state is SlotState.DRAINING and not adapter.references:
            self._vacate(adapter)

    def assign(self, digest: str) -> None:
        """Begin to load an absent, needed adapter into a spare slot."""
        if not self._free:
            _, idle = self._idle.popitem(last=False)
            self._vacate(idle)
        adapter = self._adapters[digest]
        adapter.slot = heappop(self._free)
        self._placed[digest] = adapter
        adapter.state = SlotState.LOADING
        adapter.is_hastened = False
        self._loads.append(SlotLoad(adapter.slot, digest))
        self.tell("loading", digest, adapter.slot)

    def installed(self, digest: str) -> None:
        """A loading adapter's weights are in its slot."""
        adapter = self._adapters[digest]
        assert adapter.state is SlotState.LOADING
        adapter.state = SlotState.RESIDENT
        self.tell("resident", digest, adapter.slot)
        self._settle_unneeded(adapter)

    def fail(self, digest: str) -> None:
        """A loading adapter's weights cannot be had: free its slot.

        A pinned adapter is tried again once its weights have been fetched again.
        """
        adapter = self._adapters.get(digest)
        if adapter is not None:
            adapter.is_fetched = False
            if adapter.state is SlotState.LOADING:
                self._vacate(adapter)

    def drain(self, digest: str) -> None:
        """Admit no more of a resident adapter's sequences; vacate its slot after the last one."""
        adapter = self._adapters[digest]
        assert adapter.state is SlotState.RESIDENT
        adapter.state = SlotState.DRAINING
        self.tell("draining", digest, adapter.slot)
        if not adapter.references:
            self._vacate(adapter)

    def stop_draining(self, digest: str) -> None:
        """The slot of a draining adapter is not needed after all."""
        adapter = self._adapters[digest]
        assert adapter.state is SlotState.DRAINING
        adapter.state = SlotState.RESIDENT
        self.tell("resident", digest, adapter.slot)
        self._settle_unneeded(adapter)

    def give_up(self, digest: str) -> None:
        """Vacate the slot of a resident adapter that is wanted only by queues that may not run."""
        adapter = self._adapters[digest]
        assert adapter.state is SlotState.RESIDENT and not adapter.is_pinned
        self._vacate(adapter)

    def unload(self, digest: str) -> None:
        """Drop an adapter from its slot and from host memory, once nobody needs it."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            self._forgotten.append(digest)
        else:
            adapter.is_unloading = True
            self._settle_unneeded(adapter)

    def take_changes(self) -> tuple[list[int], list[SlotLoad]]:
        """Slots to clear and loads to start, in this order; handed out once."""
        # A slot that was vacated and assigned again within a step is cleared, then loaded. A load
        # whose slot was vacated before this call never happened.
        loads = [load for load in self._loads if self._is_loading(load)]
        cleared, self._cleared, self._loads = sorted(set(self._cleared)), [], []
        return cleared, loads

    def take_notices(self) -> AdapterNotices:
        """What the adapters' source is to be told; handed out once."""
        hastened, self._hastened = self._hastened, []
        released, self._released = dict.fromkeys(self._released), []
        forgotten, self._forgotten = self._forgotten, []
        return AdapterNotices(
            hastened,
            [digest for digest in released if not self._is_needed(digest)],
            [digest for digest in forgotten if digest not in self._adapters],
        )

    def tell(self, kind: SlotEventKind, digest: str, slot: int | None) -> None:
        """Tell the observer, if there is one, what became of an adapter."""
        if self._observer is not None:
            self._observer.slot_changed(kind, digest, slot)

    def _is_needed(self, digest: str) -> bool:
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.is_needed

    def _is_loading(self, load: SlotLoad) -> bool:
        adapter = self._adapters.get(load.digest)
        return (
            adapter is not None and adapter.state is SlotState.LOADING and adapter.slot == load.slot
        )

    def _release_unneeded(self, adapter: Adapter) -> None:
        if not adapter.is_needed:
            self._released.append(adapter.digest)
            adapter.is_fetched = False
            self._settle_unneeded(adapter)

    def _settle_unneeded(self, adapter: Adapter) -> None:
        if adapter.is_needed:
            return
        match adapter.state:
            case SlotState.LOADING:
                self._vacate(adapter)
            case SlotState.RESIDENT if adapter.is_unloading:
                self._vacate(adapter)
            case SlotState.RESIDENT:
                self._idle[adapter.digest] = adapter
            case SlotState.ABSENT:
                self._drop(adapter)
            case SlotState.DRAINING:
                raise AssertionError("a draining adapter has sequences")

    def _vacate(self, adapter: Adapter) -> None:
        assert adapter.slot is not None and not adapter.references
        heappush(self._free, adapter.slot)
        del self._placed[adapter.digest]
        self._cleared.append(adapter.slot)
        self.tell("evicted", adapter.digest, adapter.slot)
        self._idle.pop(adapter.digest, None)
        adapter.slot = None
        adapter.state = SlotState.ABSENT
        if not adapter.is_needed:
            self._drop(adapter)

    def _drop(self, adapter: Adapter) -> None:
        del self._adapters[adapter.digest]
        if adapter.is_unloading:
            self._forgotten.append(adapter.digest)

    def check_integrity(self, running: Iterable[str], wanting: Iterable[str]) -> None:
        """Raise AssertionError if the counts and lists disagree with the sequences.

        `running` and `wanting` have one digest for each sequence that runs, or that exists at all.
        """
        references, wanted = Counter(running), Counter(wanting)
        slots = [adapter.slot for adapter in self._placed.values()]
        assert sorted([*slots, *self._free], key=str) == sorted(range(self.num_slots), key=str)
        for digest, adapter in self._adapters.items():
            assert adapter.references == references[digest], f"{digest}: references"
            assert adapter.wanted == wanted[digest], f"{digest}: wanted"
            assert adapter.is_needed or adapter.state is SlotState.RESIDENT, f"{digest}: lingers"
            assert adapter.is_pinned == (digest in self._pinned), f"{digest}: pinned"
            assert not (adapter.is_pinned and adapter.state is SlotState.DRAINING), digest
            is_placed = adapter.state is not SlotState.ABSENT
            assert (adapter.slot is not None) == (digest in self._placed) == is_placed, digest
            is_idle = adapter.state is SlotState.RESIDENT and not adapter.is_needed
            assert (digest in self._idle) == is_idle, f"{digest}: idle"
        assert {*wanted, *self._pinned} <= set(self._adapters), "a needed adapter is unknown"
