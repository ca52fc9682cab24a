"""Clients of an engine's socket, as the service has them."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from engine.transport.zmq_client import ZmqEngineClient
from tests.support.scripted_engine import put_fake_adapter
from tests.support.waiting import SECONDS

DEAD_AFTER = 60.0
"""Seconds of silence after which `client_of` gives its engine up."""


@contextlib.asynccontextmanager
async def client_of(
    socket_path: Path,
    cache_dir: Path | None = None,
    *,
    fetched: list[str] | None = None,
    broken: frozenset[str] = frozenset(),
    ready: bool = True,
    dead_after: float = DEAD_AFTER,
    doubt_after: float = 30.0,
) -> AsyncGenerator[ZmqEngineClient]:
    async def fetch(digest: str) -> None:
        if fetched is not None:
            fetched.append(digest)
        if digest in broken or cache_dir is None:
            raise FileNotFoundError("no such blob")
        put_fake_adapter(cache_dir, digest)

    client = ZmqEngineClient(
        socket_path, fetch, beat_seconds=0.1, dead_after=dead_after, doubt_after=doubt_after
    )
    await client.start()
    try:
        if ready:
            await client.wait_ready(SECONDS)
        yield client
    finally:
        await client.close()
