"""What every call of the registry has: a transaction, the time, and the caches to keep true."""

import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.cache.shared import SharedCache
from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.audit import Change
from adapter_store.registry.cache import ReadThroughCache
from adapter_store.registry.records import Principal, Route
from adapter_store.registry.session import Database

T = TypeVar("T")

ALL_KEYS = "all"
"""The scope of every key in the cache; a route's is its tenant's adapter."""
_STALE_KEY_SECONDS = 60.0
_STALE_ROUTE_SECONDS = 3600.0
"""How long what was read before stays in use while the database does not answer."""


def utc_now() -> datetime:
    """The time, aware."""
    return datetime.now(UTC)


class Transactions:
    """The parts that the calls share; `registry.py` has what it is for."""

    def __init__(
        self,
        database: Database,
        *,
        reserved_names: Iterable[str] = (),
        clock: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        shared: SharedCache | None = None,
    ) -> None:
        self._database = database
        self._reserved = frozenset(reserved_names)
        self._clock = clock
        self._principals = ReadThroughCache(
            "keys", Principal, shared=shared, stale_seconds=_STALE_KEY_SECONDS, monotonic=monotonic
        )
        self._used_keys: dict[str, datetime] = {}
        self._routes = ReadThroughCache(
            "routes", Route, shared=shared, stale_seconds=_STALE_ROUTE_SECONDS, monotonic=monotonic
        )

    def _change(self, actor: str) -> Change:
        return Change(actor, self._clock())

    async def _change_adapter(
        self, tenant: str, name: str, work: Callable[[AsyncSession], Awaitable[T]]
    ) -> T:
        return await self._write(self._routes, f"{tenant}/{name}", work)

    async def _change_principals(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        return await self._write(self._principals, ALL_KEYS, work)

    async def _write(
        self,
        cache: ReadThroughCache[Any],
        scope: str,
        work: Callable[[AsyncSession], Awaitable[T]],
    ) -> T:
        try:
            changed = await self._database.write(work)
        except RegistryUnavailable:
            # Probably nothing was stored, and nobody was told that it was: what was read before
            # stays in use until it can be read again.
            cache.doubt(scope)
            raise
        except BaseException:  # cancelled: the commit may have come through
            await cache.invalidate(scope)
            raise
        await cache.invalidate(scope)
        return changed
