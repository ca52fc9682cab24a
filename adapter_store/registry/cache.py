"""A small read-through cache, so that hot requests cost no SQL.

Two tiers: this process's memory, and what the API processes share. A value is kept for at most
`ttl_seconds` from before its read, over both: that bounds how long another process's change stays
unseen where its event is lost. Changes of this process are seen at once: it invalidates after every
commit, and a value read from before an invalidation is never kept after it.

Values belong to scopes, which are invalidated as one: what names an adapter, or all keys.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

from adapter_store.cache.shared import OneProcess, SharedCache
from adapter_store.errors import RegistryUnavailable

V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    expires_at: float
    stale_at: float
    value: V


class ReadThroughCache(Generic[V]):
    """Values by scope and key, read when missing. For one event loop. Absence is not cached.

    While the database does not answer, or takes more than `patience_seconds` to, a value stays in
    use for `stale_seconds` after it has expired, unless it is known to have changed.
    """

    def __init__(
        self,
        name: str,
        type_: type[V],
        *,
        shared: SharedCache | None = None,
        ttl_seconds: float = 1.0,
        stale_seconds: float = 0.0,
        patience_seconds: float = 3.0,
        max_entries: int = 4096,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._type = type_
        self._shared = shared or OneProcess()
        self._ttl_seconds = ttl_seconds
        self._stale_seconds = stale_seconds
        self._patience_seconds = patience_seconds
        self._max_entries = max_entries
        self._monotonic = monotonic
        self._entries: dict[tuple[str, str], _Entry[V]] = {}
        self._keys: dict[str, set[str]] = {}
        self._reading: dict[object, str] = {}
        self._flights: dict[tuple[str, str], asyncio.Task[V | None]] = {}
        """Reads under way that may be joined."""
        self._is_away = False
        self._probe: asyncio.Task[None] | None = None
        self._shared.subscribe(self._told)

    async def get(self, scope: str, key: str, read: Callable[[], Awaitable[V | None]]) -> V | None:
        """The cached value, else what `read` returns; None is not kept. Errors pass through.

        Whoever asks while it is read waits for the same read, unless it began before a change.
        """
        entry = self._entries.get((scope, key))
        # From before the read: the value may be as old as that.
        now = self._monotonic()
        if entry is not None and now < entry.expires_at:
            return entry.value
        if entry is not None and self._is_away and now < entry.stale_at:
            # Nobody waits for a database that let others wait in vain; one asks whether it is back.
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(self._ask_again(scope, key, read))
            return entry.value
        may_go_on = entry is not None and now < entry.stale_at
        try:
            async with asyncio.timeout(self._patience_seconds if may_go_on else None):
                return await self._join(scope, key, read)
        except (RegistryUnavailable, TimeoutError) as error:
            self._is_away = True
            entry = self._entries.get((scope, key))  # unless it was invalidated meanwhile
            if entry is not None and now < entry.stale_at:
                return entry.value
            if isinstance(error, RegistryUnavailable):
                raise
        return await self._join(scope, key, read)

    async def invalidate(self, scope: str) -> None:
        """After a change: forget the scope here and everywhere, and whatever is being read."""
        try:
            # First where it is shared: what is read there meanwhile is forgotten here next.
            await self._shared.invalidate(self._topic(scope))
        finally:
            self.forget(scope)

    def forget(self, scope: str) -> None:
        """Forget a scope in this process, and what is being read of it now."""
        self._join_no_more(scope)
        for key in self._keys.pop(scope, ()):
            del self._entries[scope, key]

    def doubt(self, scope: str | None = None) -> None:
        """A scope, or with None any, may have changed unseen: read its values again before they are
        used, those too that are being read now. What cannot be read again stays in use."""
        self._join_no_more(scope)
        for doubted in list(self._keys) if scope is None else [scope]:
            for key in self._keys.get(doubted, ()):
                entry = self._entries[doubted, key]
                self._entries[doubted, key] = entry._replace(expires_at=-math.inf)

    def _join_no_more(self, scope: str | None) -> None:
        for token in [t for t, read in self._reading.items() if scope in (None, read)]:
            del self._reading[token]
        for joined in [joined for joined in self._flights if scope in (None, joined[0])]:
            del self._flights[joined]

    async def _join(
        self, scope: str, key: str, read: Callable[[], Awaitable[V | None]]
    ) -> V | None:
        flight = self._flights.get((scope, key))
        if flight is None:
            # A task of its own: who began it may be cancelled, and others go on waiting.
            flight = asyncio.create_task(self._fetch(scope, key, read))
            self._flights[scope, key] = flight
            flight.add_done_callback(partial(self._landed, (scope, key)))
        return await asyncio.shield(flight)

    def _landed(self, key: tuple[str, str], flight: asyncio.Task[V | None]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # seen, even if nobody waits any more

    async def _ask_again(
        self, scope: str, key: str, read: Callable[[], Awaitable[V | None]]
    ) -> None:
        # What the read raises but this means that the database answered.
        with suppress(Exception):
            await self._fetch(scope, key, read)

    async def _fetch(
        self, scope: str, key: str, read: Callable[[], Awaitable[V | None]]
    ) -> V | None:
        token = object()
        self._reading[token] = scope
        try:
            value, expires_at = await self._read(scope, key, read)
            is_current = token in self._reading
        except RegistryUnavailable:
            raise
        except Exception:  # the database has answered: what was kept is gone
            self._is_away = False
            self._drop(scope, key)
            raise
        finally:
            self._reading.pop(token, None)
        if is_current:
            self._drop(scope, key)  # put back at the end: the oldest entry goes first
            if value is not None:
                self._keep(scope, key, _Entry(expires_at, expires_at + self._stale_seconds, value))
        return value

    async def _read(
        self, scope: str, key: str, read: Callable[[], Awaitable[V | None]]
    ) -> tuple[V | None, float]:
        topic = self._topic(scope)
        now = self._monotonic()
        found = await self._shared.read(topic, key)
        if found.value is not None:
            try:
                value = msgspec.json.decode(found.value, type=self._type)
            except msgspec.DecodeError:  # written by another release
                pass
            else:
                return value, now + min(found.life_seconds, self._ttl_seconds)
        began = self._monotonic()
        value = await read()
        self._is_away = False
        if value is not None and found.stamp is not None:
            life_seconds = began + self._ttl_seconds - self._monotonic()
            encoded = msgspec.json.encode(value)
            await self._shared.write(topic, key, encoded, found.stamp, life_seconds)
        return value, began + self._ttl_seconds

    def _told(self, topic: str | None) -> None:
        if topic is None:
            self.doubt()
            return
        name, _, scope = topic.partition(":")
        if name == self._name:
            self.forget(scope)

    def _topic(self, scope: str) -> str:
        return f"{self._name}:{scope}"

    def _keep(self, scope: str, key: str, entry: _Entry[V]) -> None:
        if len(self._entries) >= self._max_entries:
            self._drop(*next(iter(self._entries)))
        self._entries[scope, key] = entry
        self._keys.setdefault(scope, set()).add(key)

    def _drop(self, scope: str, key: str) -> None:
        if self._entries.pop((scope, key), None) is None:
            return
        keys = self._keys[scope]
        keys.remove(key)
        if not keys:
            del self._keys[scope]
