"""Rates over all API processes while Redis answers; without it, each process's part of them."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import structlog
from limits.aio.storage import MemoryStorage, RedisStorage

from adapter_store.cache.redis_pool import FAILURES, key_prefix, open_pool
from loraplex.limits.rate_counter import RateCounter, Taken
from loraplex.limits.window import Window

_log = structlog.get_logger("loraplex.limits")

_RETRY_SECONDS = 1.0
"""So long after a failure no request tries Redis."""
_MAX_CONNECTIONS = 32


class Charge(NamedTuple):
    """What a key was asked for, and whether it had it."""

    is_granted: bool
    window: Window
    limit: int
    """Of the counter that was asked: a part of the whole, where that is this process's own."""
    key: str
    amount: int
    window_ends_at: float
    counter: RateCounter


class SharedRates:
    """Counts by key. No method raises: a Redis that is away is done without.

    `num_processes` are then those among which a limit is shared out.
    """

    def __init__(
        self,
        shared: RateCounter | None = None,
        *,
        num_processes: Callable[[], int] = lambda: 1,
        is_away: Callable[[], bool] = lambda: False,
        local: RateCounter | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self._local = local or RateCounter(MemoryStorage())
        self._num_processes = num_processes
        self._is_away = is_away
        self._monotonic = monotonic
        self._tried_again_at = 0.0

    async def take(self, key: str, limit: int, amount: int) -> Charge:
        """Count an amount, if the limit leaves room for it."""
        if (shared := self._usable) is not None:
            try:
                taken = await shared.take(key, limit, amount)
                return _charge(taken, limit, key, amount, shared)
            except FAILURES as error:
                self._lost(error)
        if self._shared is not None:
            limit = max(1, limit // max(1, self._num_processes()))
        taken = await self._local.take(key, limit, amount)
        return _charge(taken, limit, key, amount, self._local)

    async def window(self, key: str) -> Window:
        """What counts now; of this process alone, where Redis is away."""
        if (shared := self._usable) is not None:
            try:
                return await shared.window(key)
            except FAILURES as error:
                self._lost(error)
        return await self._local.window(key)

    async def give_back(self, charge: Charge, amount: int) -> None:
        """Uncount part of a charge; what was counted in a Redis that is away is left to time."""
        if charge.counter is self._shared and self._usable is None:
            return
        try:
            await charge.counter.give_back(charge.key, amount, charge.window_ends_at)
        except FAILURES as error:
            self._lost(error)

    @property
    def _usable(self) -> RateCounter | None:
        is_usable = not self._is_away() and self._monotonic() >= self._tried_again_at
        return self._shared if is_usable else None

    def _lost(self, error: BaseException) -> None:
        self._tried_again_at = self._monotonic() + _RETRY_SECONDS
        _log.warning("shared_rates_lost", error=type(error).__name__)


def _charge(taken: Taken, limit: int, key: str, amount: int, counter: RateCounter) -> Charge:
    return Charge(taken.is_granted, taken.window, limit, key, amount, taken.window_ends_at, counter)


@asynccontextmanager
async def open_rates(
    redis_url: str | None,
    service: str,
    num_processes: Callable[[], int],
    is_away: Callable[[], bool],
) -> AsyncGenerator[SharedRates]:
    """Connect to Redis, if there is one, when it is first used.

    `service` tells services that share a Redis apart, as in the cache beside it.
    """
    if redis_url is None:
        yield SharedRates()
        return
    pool = open_pool(redis_url, max_connections=_MAX_CONNECTIONS)
    storage = RedisStorage(
        "async+redis://",  # the pool knows where
        implementation="redispy",
        key_prefix=f"{key_prefix(service)}:rates",
        connection_pool=pool,
    )
    try:
        yield SharedRates(RateCounter(storage), num_processes=num_processes, is_away=is_away)
    finally:
        await pool.disconnect()
