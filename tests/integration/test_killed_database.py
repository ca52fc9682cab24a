"""PostgreSQL dies under two API processes, alone or with Redis, and comes back.

What is known goes on, what would be written is refused, and nothing acknowledged is lost.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field

import httpx
import pytest

from adapter_store.registry.models import Adapter, AdapterVersion, Alias, Audit
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from tests.support.api_processes import Both, World
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GONE = 503, "registry_unavailable"


@pytest.fixture(scope="module")
def postgres() -> Generator[PostgresServer]:
    """A server of this file's own, whose commits outlive its processes."""
    with postgres_server(synchronous_commit="on") as server:
        yield server


@dataclass(slots=True)
class Caller:
    """Calls with a tenant's key through whichever process; counts what it was told."""

    key: str
    served: list[str] = field(default_factory=list[str])
    """The ids of calls that were answered."""

    async def ask(self, client: httpx.AsyncClient, model: str) -> tuple[int, str | None]:
        reply = await client.post(
            "/v1/completions", json={"model": model, "prompt": [1, 2, 3], "max_tokens": 2},
            headers={"authorization": f"Bearer {self.key}"},
        )  # fmt: skip
        if reply.status_code == 200:
            self.served.append(reply.json()["id"])
            return 200, None
        return reply.status_code, reply.json()["error"]["code"]


@dataclass(slots=True)
class Uploads:
    """Uploads without a pause through one process, and what it acknowledged."""

    world: World
    client: httpx.AsyncClient
    prefix: str
    digests: dict[str, str] = field(default_factory=dict[str, str])
    refused: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            name = f"{self.prefix}-{number}"
            reply = await self.world.upload(self.client, name, number)
            if reply.status_code == 201:
                self.digests[name] = reply.json()["digest"]
            else:
                self.refused[reply.status_code, reply.json()["error"]["code"]] += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            self._stop.set()
            await task


async def readiness(client: httpx.AsyncClient) -> tuple[int, str, str | None]:
    reply = await client.get("/health/ready")
    return reply.status_code, reply.json()["registry"], reply.json().get("cache")


async def until_well(both: Both) -> None:
    async with asyncio.timeout(30):
        for client in both:
            while await readiness(client) != (200, "ok", None):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("with_redis", [False, True])
async def test_what_is_known_goes_on_without_the_database_and_nothing_acknowledged_is_lost(
    world: World, both: Both, postgres: PostgresServer, redis_session: RedisServer, with_redis: bool
):
    apis = world.apis
    prefix = f"redis-{with_redis}".lower()
    known = f"known-{prefix}"
    made = (await both[0].post("/admin/tenants/acme/keys", json={})).raise_for_status()
    caller = Caller(made.json()["key"])
    (await world.upload(both[0], known, 1)).raise_for_status()
    await until_well(both)
    for client in both:
        assert await caller.ask(client, known) == (200, None)
    tables = (Adapter, AdapterVersion, Alias, Audit)
    rows_before = await world.count_rows(*tables)

    async with contextlib.AsyncExitStack() as stack:
        streaming, *uploading = [
            await stack.enter_async_context(apis.client(pid))
            for pid in (apis.pids()[0], *apis.pids())
        ]
        stream = await apis.stream(streaming, known, 1500)
        writers = [
            Uploads(world, client, f"{prefix}-{number}") for number, client in enumerate(uploading)
        ]
        async with writers[0].running(), writers[1].running():
            for writer in writers:
                await writer.until(lambda writer=writer: len(writer.digests) >= 3)
            postgres.kill()
            if with_redis:
                redis_session.stop()
            for writer in writers:
                await writer.until(lambda writer=writer: writer.refused[GONE] >= 2)
            for _ in range(3):
                for client in both:
                    assert await caller.ask(client, known) == (200, None)
                    assert await caller.ask(client, "unheard-of") == GONE
                    assert await caller.ask(client, "base") == (200, None)
            for client in both:
                assert (await client.get("/t/acme/v1/adapters")).status_code == 503
                cache = "degraded" if with_redis else None
                assert await readiness(client) == (200, "degraded", cache)
            num_refused = [writer.refused[GONE] for writer in writers]
            if with_redis:
                redis_session.start()
                async with asyncio.timeout(30):
                    for client in both:
                        while await readiness(client) != (200, "degraded", None):  # noqa: ASYNC110
                            await asyncio.sleep(0.05)
                for client in both:
                    assert await caller.ask(client, known) == (200, None)
            postgres.start()
            for writer, number in zip(writers, num_refused, strict=True):
                acknowledged = len(writer.digests)
                await writer.until(lambda w=writer, n=acknowledged: len(w.digests) >= n + 2)
                assert writer.refused[GONE] >= number
        assert (await stream.task)[-1] == "[DONE]"
        caller.served.append(stream.call)

    for writer in writers:
        assert set(writer.refused) == {GONE}
    await until_well(both)
    acknowledged = {**writers[0].digests, **writers[1].digests}
    listed: dict[str, str] = {}
    for name in acknowledged:
        versions = (await both[1].get(f"/t/acme/v1/adapters/{name}/versions")).raise_for_status()
        [listed[name]] = [version["digest"] for version in versions.json()["data"]]
    assert listed == acknowledged
    grown = await world.count_rows(*tables)
    assert grown["adapter"] - rows_before["adapter"] >= len(acknowledged)
    # An upload is all of its rows, or none of them.
    assert {
        grown[name] - rows_before[name] for name in ("adapter", "adapter_version", "alias")
    } == {grown["adapter"] - rows_before["adapter"]}
    assert grown["audit"] - rows_before["audit"] == 2 * (grown["adapter"] - rows_before["adapter"])
    assert (await asyncio.to_thread(world.swept, "--dry-run"))["missing"] == []
    await check_usage(world, caller)
    for client in both:
        assert await caller.ask(client, "unheard-of") == (404, "model_not_found")
        for name in (known, next(reversed(writers[0].digests))):
            assert await caller.ask(client, name) == (200, None)


async def check_usage(world: World, caller: Caller) -> None:
    """Every call that was answered has one row, once those that waited are written."""
    registry = Registry(Database(world.database_url))
    try:
        async with asyncio.timeout(60):
            while True:
                rows = Counter(row.request_id for row in await registry.list_usage("acme", 1000))
                if set(caller.served) <= rows.keys():
                    break
                await asyncio.sleep(0.1)
        assert set(rows.values()) == {1}
    finally:
        await registry.close()
