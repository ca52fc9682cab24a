"""The service while Redis comes and goes: slower by some SQL, and never in error."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter_store.cache.redis_cache import RedisCache
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
