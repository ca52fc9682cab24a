"""Which adapter held which slot when: stays with a begin and an end, made from events."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from engine.telemetry.records import AdapterOwner, SlotEvent, SlotEventKind


@dataclass(slots=True)
class Stay:
    """A slot in one state. `began` with digest and kind tells it from all others."""

    slot: int | None
    """While it is only reserved, the slot that is drained for it."""
    kind: SlotEventKind
    digest: str
    owners: tuple[AdapterOwner, ...]
    began: float
    ended: float | None = None


class SlotBook:
    """Stays that last, by slot, and reservations, by digest."""

    def __init__(self, lasting: Iterable[Stay] = ()) -> None:
        """`lasting` are those of the same engine that were written before."""
        self._slots: dict[int, Stay] = {}
        self._reserved: dict[str, Stay] = {}
        self._changed: list[Stay] = []
        for stay in lasting:
            if stay.kind == "reserved":
                self._reserved[stay.digest] = stay
            elif stay.slot is not None:
                self._slots[stay.slot] = stay

    @property
    def residents(self) -> list[Stay]:
        """Adapters that hold a slot with their weights in it."""
        return [stay for stay in self._slots.values() if stay.kind in ("resident", "draining")]

    def is_arrival(self, event: SlotEvent) -> bool:
        """Whether an adapter comes into its slot with this event, and not back from draining."""
        before = None if event.slot is None else self._slots.get(event.slot)
        return event.kind == "resident" and (before is None or before.kind == "loading")

    def take(self, event: SlotEvent) -> None:
        """Take in an event; they come in the order of time."""
        if event.kind == "reserved":
            if event.digest not in self._reserved:
                self._reserved[event.digest] = self._begin(event)
            return
        if event.slot is None:
            return
        if event.kind == "shared":
            self._share(event, self._slots.get(event.slot))
            return
        before = self._slots.pop(event.slot, None)
        if before is not None:
            self._end(before, event.at)
        if event.kind == "evicted":
            return
        self._slots[event.slot] = self._begin(event)
        reserved = self._reserved.pop(event.digest, None)
        if reserved is not None:
            reserved.slot = event.slot
            self._end(reserved, event.at)

    def drop_reservations(self, waiting: Collection[str], at: float) -> None:
        """End reservations of adapters that nobody waits for any more."""
        for digest in [digest for digest in self._reserved if digest not in waiting]:
            self._end(self._reserved.pop(digest), at)

    def end_all(self, at: float) -> None:
        """The engine is gone."""
        for stay in (*self._slots.values(), *self._reserved.values()):
            self._end(stay, at)
        self._slots.clear()
        self._reserved.clear()

    def take_changed(self) -> list[Stay]:
        """Copies of the stays that began or ended since the last call."""
        changed, self._changed = self._changed, []
        return [replace(stay) for stay in changed]

    def _begin(self, event: SlotEvent) -> Stay:
        stay = Stay(event.slot, event.kind, event.digest, event.owners, event.at)
        self._changed.append(stay)
        return stay

    def _share(self, event: SlotEvent, stay: Stay | None) -> None:
        if stay is not None and stay.digest == event.digest:
            stay.owners = event.owners
            self._note(stay)

    def _end(self, stay: Stay, at: float) -> None:
        stay.ended = max(at, stay.began)
        self._note(stay)

    def _note(self, stay: Stay) -> None:
        if not any(stay is known for known in self._changed):
            self._changed.append(stay)
