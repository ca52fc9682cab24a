"""The service's side of the engine's `Need`: fetches in the background, then answers."""

import asyncio
from collections.abc import Callable

import structlog

from engine.client import FetchAdapter
from engine.messages import FetchFailed, Have

MAX_FETCHES = 8
"""Fetches that run at once; others wait for their turn."""
FETCH_SECONDS = 300.0
"""A fetch that takes longer has failed, or one that hangs would block its requests, and a turn, for
ever."""


class AdapterFetcher:
    """Runs one fetch for each digest, however often it is asked for."""

    def __init__(
        self,
        fetch: FetchAdapter,
        answer: Callable[[Have | FetchFailed], None],
        *,
        patience: float = FETCH_SECONDS,
    ) -> None:
        self._fetch = fetch
        self._patience = patience
        self._answer = answer
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = structlog.get_logger("engine.fetch")

    def start(self, digest: str) -> None:
        """Begin to fetch, unless it is under way."""
        if digest not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._run(digest))
            self._tasks[digest] = task
            task.add_done_callback(lambda _: self._tasks.pop(digest, None))

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, digest: str) -> None:
        async with self._turns:
            limit = asyncio.timeout(self._patience)
            try:
                async with limit:
                    await self._fetch(digest)
            except Exception as error:  # whatever it is, the engine must hear of it
                reason = str(error) or type(error).__name__
                if limit.expired():
                    reason = f"it was not there within {self._patience:g} s"
                self._log.warning("fetch_failed", adapter=digest[:12], reason=reason)
                self._answer(FetchFailed(digest, reason[:500]))
            else:
                self._answer(Have(digest))
