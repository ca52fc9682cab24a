"""One adapter's stay in a slot, and whose account it is on."""

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
    """On the account of whoever asked for it last before it was loaded. Times in nanoseconds."""

    __slots__ = ("_owner", "_settled_at", "load_ns", "loading_since", "resident_at")

    def __init__(self, now: int, owners: tuple[AdapterOwner, ...]) -> None:
        self.loading_since = now
        self.resident_at: int | None = None
        self.load_ns = 0
        """What the way to host memory and from there to the slot took, waiting not counted."""
        self._owner = owners[0] if owners else None
        self._settled_at = now

    def arrive(self, now: int, fetch: Fetch | None, table: AdapterTable) -> None:
        """The weights are in the slot; `fetch`: how they came to host memory, if they had to."""
        self.resident_at = now
        if fetch is None:
            self.load_ns = now - self.loading_since
        else:  # what the slot waited for it counts once
            self.load_ns = fetch.nanoseconds + now - max(self.loading_since, fetch.ended_at)
        observe(self._totals(now, table).load_seconds, LOAD_SECONDS, self.load_ns / 1e9)

    def settle(self, now: int, table: AdapterTable) -> None:
        """Book the time since the last call."""
        self._totals(now, table).resident_seconds += (now - self._settled_at) / 1e9
        self._settled_at = now

    def forget(self, tenant: str, adapter: str | None) -> None:
        """Its owner was deleted."""
        if self._owner is not None and concerns(self._owner, tenant, adapter):
            self._owner = None

    def _totals(self, now: int, table: AdapterTable) -> AdapterTotals:
        owner = self._owner
        if owner is None:
            return table.other
        return table.totals_of(owner.tenant, name_of(owner.label), now / 1e9)
