"""The service while Redis comes and goes: slower by some SQL, and never in error."""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter_store.cache.redis_cache import RedisCache
from loraplex.heartbeats import Heartbeats
from loraplex.limits.shared_rates import open_rates
from tests.support.redis_server import RedisServer
from tests.support.service import TestService, running_service

pytestmark = pytest.mark.anyio


async def health(client: httpx.AsyncClient) -> dict[str, Any]:
    reply = await client.get("/health/ready")
    assert reply.status_code == 200
    return reply.json()


async def told(client: httpx.AsyncClient, cache: str | None) -> None:
    async with asyncio.timeout(10):
        while (await health(client)).get("cache") != cache:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


async def metrics(service: TestService) -> list[str]:
    async with service.client("admin") as admin:
        return (await admin.get("/metrics")).raise_for_status().text.splitlines()


async def test_the_service_goes_on_without_redis_and_says_so(
    tmp_path: Path, redis_server: RedisServer
):
    async with (
        RedisCache(redis_server.url, "service", call_seconds=1.0) as cache,
        running_service(tmp_path, shared_cache=cache) as service,
        service.client("acme:tenant") as client,
    ):
        await told(client, None)
        await service.upload("a")
        assert redis_server.names()
        await asyncio.to_thread(redis_server.stop)
        await told(client, "degraded")
        assert "loraplex_degraded 1.0" in await metrics(service)
        await service.upload("a", seed=1)
        adapters = (await client.get("/v1/adapters")).json()["data"]
        assert [adapter["latest_version"] for adapter in adapters] == [2]
        async with service.client() as caller:
            assert (await caller.get("/v1/models/a@2")).status_code == 200
        await asyncio.to_thread(redis_server.start)
        await told(client, None)
        assert "loraplex_degraded 0.0" in await metrics(service)


# What Redis would say, what it would not, and what is no word of its protocol.
_WORDS = [
    b"+OK\r\n", b":1\r\n", b":x\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"$x\r\n", b"*0\r\n",
    b"*-1\r\n",
    b"*2\r\n:1\r\n$1\r\nx\r\n", b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n", b"-ERR\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff\xfe\r\n", b"*1\r\n*1\r\n*1\r\n:1\r\n",
    b"*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\nx\r\n",
]  # fmt: skip


async def test_what_is_no_redis_at_all_costs_no_error():
    rng = random.Random(1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                writer.write(b"".join(rng.choices(_WORDS, k=4)))
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"redis://127.0.0.1:{port}/0"
        async with (
            RedisCache(url, "s", call_seconds=0.02) as cache,
            open_rates(url, "s", lambda: 1, lambda: False) as rates,
            Heartbeats(url, "s", beat_seconds=3600) as heartbeats,
        ):
            for number in range(100):
                cache._is_connected = True  # whatever it found out a moment ago
                await cache.read("t:a", "k")
                await cache.invalidate("t:a")
                rates._tried_again_at = 0.0
                charge = await rates.take(f"acme/{number}", 10, 1)
                assert charge.is_granted or charge.counter is not rates._local
                await rates.give_back(charge, 1)
                await heartbeats._try_to_beat()
                heartbeats.alive()
            assert cache._listener is not None and not cache._listener.done()
