"""An `AdapterSource` whose adapters are in host memory from the start."""

from collections.abc import Mapping
from typing import Any

from engine.adapters.source import AdapterEvent, AdapterReady


class LoadedAdapters:
    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        self._events: list[AdapterEvent] = []

    def prefetch(self, digest: str) -> None:
        self._events.append(AdapterReady(digest, 0.0))

    def poll(self) -> list[AdapterEvent]:
        events, self._events = self._events, []
        return events

    def hasten(self, digest: str) -> None:
        pass

    def get(self, digest: str) -> Any | None:
        return self._weights.get(digest)

    def release(self, digest: str) -> None:
        pass

    def forget(self, digest: str) -> None:
        pass
