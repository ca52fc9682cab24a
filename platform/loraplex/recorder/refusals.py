"""How many requests the engine refused since it was last asked: differences of its sums."""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.telemetry.records import EngineTotals


class RefusalCounts:
    """Sums by reason and adapter, as of the last answer; `state` keeps them over a restart.

    The engine folds adapters with little traffic into one sum for all others, and what it folds was
    counted before. So of that sum only as much is new as all sums together have grown.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._generation: int = state["generation"] if state else 0
        self._counts: dict[str, dict[str, int]] = dict(state["counts"]) if state else {}

    @property
    def state(self) -> dict[str, Any]:
        """For the next recorder, as JSON has it."""
        return {"generation": self._generation, "counts": self._counts}

    def take(
        self, generation: int, totals: EngineTotals
    ) -> Iterator[tuple[str, str | None, str, int]]:
        """Tenant ("" for the others'), adapter, reason and number of what was refused since."""
        before = self._counts if generation == self._generation else {}
        counts: dict[str, dict[str, int]] = {}
        told: dict[str, int] = {}
        for adapter in totals.adapters:
            name = f"{adapter.tenant}/{adapter.adapter or ''}"
            for code, number in adapter.refused.items():
                counts.setdefault(code, {})[name] = number
                new = number - before.get(code, {}).get(name, 0)
                if adapter.tenant and new > 0:
                    told[code] = told.get(code, 0) + new
                    yield adapter.tenant, adapter.adapter, code, new
        for code, by_name in counts.items():
            grown = sum(by_name.values()) - sum(before.get(code, {}).values())
            if grown > told.get(code, 0):
                yield "", None, code, grown - told.get(code, 0)
        self._generation, self._counts = generation, counts
