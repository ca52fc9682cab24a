"""Waiting for what others do, of which nothing tells."""

import asyncio
import time
from collections.abc import Callable

from engine.client import EngineClient

SECONDS = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; fails after a minute."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def eventually(condition: Callable[[], bool]) -> None:
    """As `until`, while others run."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.002)


async def until_idle(engine: EngineClient) -> None:
    """Wait until an engine has no request left, and no block of one."""
    async with asyncio.timeout(SECONDS):
        while True:
            stats = await engine.stats()
            if (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0):
                return
            await asyncio.sleep(0.002)
