"""What was used in the last minute, by key: counted in Redis, or in this process.

The counting is that of the library `limits`; what it lacks is giving back. That happens in the
window in which it was taken, current or previous, or the next window would let too much pass.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from limits.aio.storage import MemoryStorage, RedisStorage

from loraplex.limits.window import MINUTE, Window

_MARGIN_SECONDS = 0.05
"""So shortly before a window ends nothing is given back: it could arrive in the next one."""


class Taken(NamedTuple):
    """An amount that counts, or does not if there was no room for it."""

    is_granted: bool
    window: Window
    """As it is after that."""
    window_ends_at: float


class RateCounter:
    """Counts in one storage. Methods raise what the storage's client raises."""

    def __init__(
        self, storage: MemoryStorage | RedisStorage, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._clock = clock

    async def take(self, key: str, limit: int, amount: int) -> Taken:
        """Count an amount, if no more than `limit` counts then."""
        granted = await self._storage.acquire_sliding_window_entry(key, limit, MINUTE, amount)
        window = await self.window(key)
        return Taken(granted, window, self._clock() + window.current_left)

    async def window(self, key: str) -> Window:
        """What counts now."""
        found = await self._storage.get_sliding_window(key, MINUTE)
        previous, previous_left, current, current_life = found
        # The storages keep a window for as long again, as the previous one.
        return Window(previous, previous_left, current, max(0.0, current_life - MINUTE))

    async def give_back(self, key: str, amount: int, window_ends_at: float) -> None:
        """Uncount part of what was taken in the window that ends, or ended, then."""
        now = self._clock()
        window = await self.window(key)
        windows_ago = round((now + window.current_left - window_ends_at) / MINUTE)
        counted = {0: window.current, 1: window.previous}.get(windows_ago, 0)
        amount = min(amount, counted)
        if amount > 0 and window.current_left > _MARGIN_SECONDS:
            name = self._names(key, now)[windows_ago]
            await self._storage.incr(name, 2 * MINUTE, -amount)

    def _names(self, key: str, now: float) -> tuple[str, str]:
        """What the storage calls the current window and the previous one."""
        if isinstance(self._storage, MemoryStorage):
            previous, current = self._storage.sliding_window_keys(key, MINUTE, now)
            return current, previous
        return f"{{{key}}}", f"{{{key}}}/-1"
