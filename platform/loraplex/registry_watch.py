"""Whether the database answers, as the readiness page tells it.

A database that has just gone away leaves the service at work: keys and adapters that it knows go on
for a minute. A balancer that took every process out at once would make an outage of that.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.registry import Registry

GRACE_SECONDS = 60.0
"""As long as the registry lets known keys go on."""
_ASK_SECONDS = 1.0

RegistryStatus = Literal["ok", "degraded", "unavailable"]
"""`degraded`: it does not answer, and did within the last minute."""


class RegistryWatch:
    """Asks the registry whenever it is asked, and remembers when it last answered."""

    def __init__(
        self, registry: Registry, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._monotonic = monotonic
        self._answered_at: float | None = None

    async def status(self) -> RegistryStatus:
        """Return how it is; within a second, also while its host swallows every packet."""
        asked_at = self._monotonic()
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                await self._registry.ping()
        except (RegistryUnavailable, TimeoutError):
            answered_at = self._answered_at
            if answered_at is None or asked_at - answered_at >= GRACE_SECONDS:
                return "unavailable"
            return "degraded"
        self._answered_at = asked_at
        return "ok"
