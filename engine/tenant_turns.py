"""A few places for slow work, of which each tenant has at most one at a time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class TenantTurns:
    """For one event loop. Waiters are served in the order of arrival, one of each tenant."""

    def __init__(self, num_places: int) -> None:
        self._places = asyncio.Semaphore(num_places)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncGenerator[None]:
        """Wait for the tenant's turn, and have a place."""
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = asyncio.Lock()
        async with turn, self._places:
            yield
