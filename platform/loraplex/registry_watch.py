"""Whether the database answers, as the readiness page tells it.

A database that has just gone away leaves the service at work: keys and adapters that it knows go on
for a minute. A balancer that took every process out at once would make an outage of that.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.registry import Registry

GRACE_SECONDS = 60.0
"""As long as the registry lets known keys go on."""
_PAGE_SECONDS = 1.0
"""A page waits no longer, but for the first answer of all."""
_ANSWER_SECONDS = 5.0
"""An answer that takes longer is none: as long as the registry waits for a connection."""

RegistryStatus = Literal["ok", "degraded", "unavailable"]
"""`degraded`: it does not answer at once, and did answer within the last minute."""


class RegistryWatch:
    """Asks the registry when it is asked, one question at a time, and knows when it last answered.

    A question outlives the page that began it: a database that is only slow, at its first
    connection or under load, is not taken for one that is gone. An async context manager; leaving
    it ends the question.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        page_seconds: float = _PAGE_SECONDS,
        answer_seconds: float = _ANSWER_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._page_seconds = page_seconds
        self._answer_seconds = answer_seconds
        self._monotonic = monotonic
        self._answered_at: float | None = None
        self._question: asyncio.Task[bool] | None = None

    async def status(self) -> RegistryStatus:
        """Return how it is; within a second, also while its host swallows every packet.

        Until it has answered once there is nothing to go by: then the page waits for the answer.
        """
        now = self._monotonic()
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask(), name="registry-watch")
        question = self._question
        # Not longer than the question itself, which gives up.
        patience = None if self._answered_at is None else self._page_seconds
        await asyncio.wait([question], timeout=patience)
        if question.done() and question.result():
            return "ok"
        answered_at = self._answered_at
        if answered_at is None or now - answered_at >= GRACE_SECONDS:
            return "unavailable"
        return "degraded"

    async def _ask(self) -> bool:
        asked_at = self._monotonic()
        try:
            async with asyncio.timeout(self._answer_seconds):
                await self._registry.ping()
        except (RegistryUnavailable, TimeoutError):
            return False
        self._answered_at = asked_at
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)
