"""Waiting for what other processes do, of which nothing tells."""

import asyncio
import time
from collections.abc import Callable

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
            await asyncio.sleep(0.01)
