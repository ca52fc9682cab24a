"""Totals by adapter, bounded: the adapters with most traffic have their own, all others share one.

Traffic is counted in tokens and halves every ten minutes. While there is room, an adapter gets its
own totals with its first request. Later, an adapter that shares is promoted when it has twice the
traffic of the least busy one with its own. That is hysteresis, because every promotion is a new
series for whoever scrapes the metrics. Among adapters that share, only the busiest are tracked
(Space-Saving: Metwally, Agrawal, El Abbadi, "Efficient computation of frequent and top-k elements
in data streams", 2005).
"""

from dataclasses import dataclass

from engine.telemetry.adapter_totals import new_totals, pour
from engine.telemetry.records import AdapterTotals

REVIEW_SECONDS = 10.0
HALF_LIFE_SECONDS = 600.0
LATE_SECONDS = 2.0
"""How late the engine may learn of refusals by the service."""
IDLE_SECONDS = 3600.0
"""An adapter without traffic for this long loses its own totals."""
PROMOTION = 2.0
CANDIDATES = 4
"""Adapters without totals of their own that are tracked, for each that has them."""

OTHER = ""
"""The tenant of the shared totals; no tenant has this name."""

_Key = tuple[str, str | None]


@dataclass(slots=True)
class _Place:
    totals: AdapterTotals
    traffic: float
    used_at: float


@dataclass(slots=True)
class _Candidate:
    traffic: float
    surplus: float = 0.0
    """How much of `traffic` may have been another adapter's."""

    @property
    def sure_traffic(self) -> float:
        return self.traffic - self.surplus


class AdapterTable:
    """No sum ever shrinks: an adapter that loses its totals adds them to the shared ones."""

    def __init__(self, max_adapters: int, now: float) -> None:
        """`now` and all other times are seconds of one clock."""
        self._max_adapters = max_adapters
        self._places: dict[_Key, _Place] = {}
        self._candidates: dict[_Key, _Candidate] = {}
        self._forgotten: dict[_Key, float] = {}
        """When each was forgotten, for requests that arrived before and end later."""
        self._other = new_totals(OTHER, None)
        self._reviewed_at = now

    def totals_of(self, tenant: str, adapter: str | None, now: float) -> AdapterTotals:
        """Where to count what concerns this adapter (None: the tenant's use of the base)."""
        place = self._places.get((tenant, adapter))
        if place is None:
            if len(self._places) >= self._max_adapters:
                return self._other
            place = self._seat((tenant, adapter), 0.0, now)
        place.used_at = now
        return place.totals

    def refusals_of(self, tenant: str, adapter: str | None, now: float) -> AdapterTotals:
        """As `totals_of`, for refusals, which may be told after their adapter was deleted."""
        if self._forgotten and self._is_forgotten(tenant, adapter, now - LATE_SECONDS):
            return self._other
        return self.totals_of(tenant, adapter, now)

    def note_traffic(
        self, tenant: str, adapter: str | None, num_tokens: int, arrived: float, now: float
    ) -> AdapterTotals:
        """As `totals_of`, for a request with so many tokens."""
        if self._forgotten and self._is_forgotten(tenant, adapter, arrived):
            return self._other
        totals = self.totals_of(tenant, adapter, now)
        key = tenant, adapter
        if totals is self._other:
            self._note_candidate(key, num_tokens)
        else:
            self._places[key].traffic += num_tokens
        if now >= self._reviewed_at + REVIEW_SECONDS:
            self.review(now)
            if key not in self._places:  # it lost its place: counting there would be in vain
                return self._other
        return totals

    def forget(self, tenant: str, adapter: str | None, now: float) -> None:
        """An adapter was deleted; without a name, the whole tenant."""
        self._forgotten[tenant, adapter] = now
        for key in [key for key in self._places if _concerns(key, tenant, adapter)]:
            self._unseat(key)
        for key in [key for key in self._candidates if _concerns(key, tenant, adapter)]:
            del self._candidates[key]

    def review(self, now: float) -> None:
        """Forget old traffic, and give places to those that have earned them."""
        kept = 0.5 ** ((now - self._reviewed_at) / HALF_LIFE_SECONDS)
        self._reviewed_at = now
        self._forgotten = {
            key: at for key, at in self._forgotten.items() if now - at < IDLE_SECONDS
        }
        for place in self._places.values():
            place.traffic *= kept
        for candidate in self._candidates.values():
            candidate.traffic *= kept
            candidate.surplus *= kept
        for key, place in list(self._places.items()):
            if now - place.used_at > IDLE_SECONDS:
                self._unseat(key)
        while self._candidates:
            key = max(self._candidates, key=lambda key: self._candidates[key].sure_traffic)
            traffic = self._candidates[key].sure_traffic
            if len(self._places) >= self._max_adapters:
                least = min(self._places, key=lambda key: self._places[key].traffic, default=None)
                if least is None:
                    return
                if traffic <= PROMOTION * self._places[least].traffic:
                    return
                self._unseat(least)
            self._seat(key, traffic, now)

    @property
    def other(self) -> AdapterTotals:
        """The shared ones."""
        return self._other

    def all(self) -> list[AdapterTotals]:
        """Those of adapters, then the shared ones."""
        return [*(place.totals for place in self._places.values()), self._other]

    def _is_forgotten(self, tenant: str, adapter: str | None, arrived: float) -> bool:
        keys = (tenant, adapter), (tenant, None)
        return any(arrived <= self._forgotten.get(key, -1.0) for key in keys)

    def _seat(self, key: _Key, traffic: float, now: float) -> _Place:
        self._candidates.pop(key, None)
        place = self._places[key] = _Place(new_totals(*key), traffic, now)
        return place

    def _unseat(self, key: _Key) -> None:
        pour(self._other, self._places.pop(key).totals)

    def _note_candidate(self, key: _Key, num_tokens: int) -> None:
        candidates = self._candidates
        candidate = candidates.get(key)
        if candidate is None:
            surplus = 0.0
            if len(candidates) >= CANDIDATES * self._max_adapters:
                if not candidates:
                    return
                # The newcomer takes over the least one's count: too high, but never too low.
                least = min(candidates, key=lambda key: candidates[key].traffic)
                surplus = candidates.pop(least).traffic
            candidate = candidates[key] = _Candidate(surplus, surplus)
        candidate.traffic += num_tokens


def _concerns(key: _Key, tenant: str, adapter: str | None) -> bool:
    return key[0] == tenant and (adapter is None or key[1] == adapter)
