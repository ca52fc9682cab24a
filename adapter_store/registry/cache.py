"""A small read-through cache, so that hot requests cost no SQL.

An entry lives for at most `ttl_seconds`: that bounds how long another process's change stays
unseen. Changes of this process are seen at once: it invalidates after every commit, and a value
read from before an invalidation is never stored after it.
"""

import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ReadThroughCache(Generic[K, V]):
    """Values by key, read when missing. For one event loop; what isn't there is not remembered."""

    def __init__(
        self,
        *,
        ttl_seconds: float = 1.0,
        max_entries: int = 4096,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._max_entries = max_entries
        self._monotonic = monotonic
        self._stamp = 0
        self._entries: dict[K, tuple[float, V]] = {}

    async def get(self, key: K, read: Callable[[], Awaitable[V | None]]) -> V | None:
        """The cached value, else what `read` returns; None is not stored. Errors pass through."""
        entry = self._entries.get(key)
        # From before the read: the value may be as old as that.
        now = self._monotonic()
        if entry is not None and now < entry[0]:
            return entry[1]
        stamp = self._stamp
        value = await read()
        if stamp == self._stamp:
            self._entries.pop(key, None)  # put back at the end: the oldest entry goes first
            if value is not None:
                self._store(key, now + self._ttl_seconds, value)
        return value

    def _store(self, key: K, expires_at: float, value: V) -> None:
        if len(self._entries) >= self._max_entries:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (expires_at, value)

    def clear(self) -> None:
        """Forget everything, and whatever is being read now."""
        self._stamp += 1
        self._entries.clear()
