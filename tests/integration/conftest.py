"""Fixtures: a service with two API processes, started once for a file of tests."""

import asyncio
from collections.abc import AsyncGenerator, Generator

import httpx
import pytest

from loraplex.database import upgrade
from tests.support.api_processes import Both, World, api_processes
from tests.support.postgres import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, redis_session: RedisServer
) -> Generator[World]:
    folder = tmp_path_factory.mktemp("apis")
    model_dir = make_tiny_model(folder / "model", "smollm", max_position_embeddings=8192)
    adapter = make_tiny_adapter(folder / "adapter", model_dir)
    with postgres.database() as url:
        asyncio.run(upgrade(url))
        redis_session.renew()
        with api_processes(model_dir, url, redis_session.url) as apis:
            headers = {"authorization": f"Bearer {apis.service.admin_key}"}
            with httpx.Client(base_url=apis.service.url, headers=headers, timeout=60) as http:
                for tenant in ("acme", "zen"):
                    http.post("/admin/tenants", json={"name": tenant}).raise_for_status()
            yield World(apis, adapter, url)


@pytest.fixture
async def both(world: World) -> AsyncGenerator[Both]:
    """A client of each process."""
    await world.apis.until(lambda: len(world.apis.pids()) == 2)
    first, second = world.apis.pids()
    async with world.apis.client(first) as a, world.apis.client(second) as b:
        yield a, b
