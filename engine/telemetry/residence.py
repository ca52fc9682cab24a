"""One adapter's stay in a slot, and in whose totals it counts."""

from typing import NamedTuple

from engine.telemetry.adapter_table import AdapterTable
from engine.telemetry.buckets import LOAD_SECONDS, observe
from engine.telemetry.labels import name_of
from engine.telemetry.owners import concerns
from engine.telemetry.records import AdapterOwner, AdapterTotals


class Fetch(NamedTuple):
    """An adapter's way to host memory."""

    nanoseconds: int
    ended_at: int


class Residence:
    """The stay counts for every adapter with these weights that was asked for.

    The load counts only for the one that was asked for last before it. Times in nanoseconds.
    """

    __slots__ = ("_settled_at", "load_ns", "loading_since", "owners", "resident_at", "slot")

    def __init__(self, now: int, slot: int, owners: tuple[AdapterOwner, ...]) -> None:
        self.slot = slot
        self.owners = owners
        self.loading_since = now
        self.resident_at: int | None = None
        self.load_ns = 0
        """Time to host memory and from there to the slot, without the wait for a slot."""
        self._settled_at = now

    def arrive(self, now: int, fetch: Fetch | None, table: AdapterTable) -> None:
        """The weights are in the slot; `fetch`: how they came to host memory, if they had to."""
        self.resident_at = now
        if fetch is None:
            self.load_ns = now - self.loading_since
        else:  # time in which the slot waited for the fetch counts once
            self.load_ns = fetch.nanoseconds + now - max(self.loading_since, fetch.ended_at)
        totals = self._totals(now, table)[0]
        observe(totals.load_seconds, LOAD_SECONDS, self.load_ns / 1e9)

    def settle(self, now: int, table: AdapterTable) -> None:
        """Book the time since the last call."""
        for totals in self._totals(now, table):
            totals.resident_seconds += (now - self._settled_at) / 1e9
        self._settled_at = now

    def share(self, owner: AdapterOwner, now: int, table: AdapterTable) -> None:
        """One more asks for it."""
        self.settle(now, table)
        self.owners = (*self.owners, owner)

    def forget(self, tenant: str, adapter: str | None) -> None:
        """An owner was deleted."""
        self.owners = tuple(owner for owner in self.owners if not concerns(owner, tenant, adapter))

    def _totals(self, now: int, table: AdapterTable) -> list[AdapterTotals]:
        """The totals of all owners, each once: adapters without their own share some."""
        names = dict.fromkeys((owner.tenant, name_of(owner.label)) for owner in self.owners)
        found = {id(t): t for name in names if (t := table.totals_of(*name, now / 1e9))}
        return list(found.values()) or [table.other]
