"""How many requests the engine refused since it was last asked: differences of its sums."""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.telemetry.records import EngineTotals


class RefusalCounts:
    """Sums by tenant, adapter and reason, as of the last answer; `state` keeps them over a restart.

    An adapter that the engine folds into the sum of all others, or out of it, starts anew: what it
    was refused in that second is told for one of both at most.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._generation: int = state["generation"] if state else 0
        self._counts: dict[str, int] = dict(state["counts"]) if state else {}

    @property
    def state(self) -> dict[str, Any]:
        """For the next recorder, as JSON has it."""
        return {"generation": self._generation, "counts": self._counts}

    def take(
        self, generation: int, totals: EngineTotals
    ) -> Iterator[tuple[str, str | None, str, int]]:
        """Tenant, adapter, reason and number of what was refused since."""
        known = self._counts if generation == self._generation else {}
        counts: dict[str, int] = {}
        for adapter in totals.adapters:
            for code, number in adapter.refused.items():
                key = f"{adapter.tenant}/{adapter.adapter or ''}/{code}"
                counts[key] = number
                if number > known.get(key, 0):
                    yield adapter.tenant, adapter.adapter, code, number - known.get(key, 0)
        self._generation, self._counts = generation, counts
