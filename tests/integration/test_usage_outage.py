"""The service is stopped while its database is away: the usage of its calls is there afterwards."""

import asyncio
import contextlib
import os
import signal
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from loraplex.database import upgrade
from tests.support.api_processes import api_processes
from tests.support.postgres import postgres_server
from tests.support.redis_server import RedisServer
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TOKENS_A_MINUTE = 10_000


async def test_usage_that_a_stop_finds_queued_is_there_once_after_the_next_start(
    tmp_path: Path, redis_server: RedisServer
):
    model_dir = make_tiny_model(tmp_path / "model", "smollm")
    spilled = tmp_path / "data" / "usage"
    said: dict[str, int] = {}
    """Completion tokens by call, as the replies had it."""

    async def ask(client: httpx.AsyncClient, key: str) -> httpx.Response:
        asked = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        headers = {"authorization": f"Bearer {key}"}
        reply = await client.post("/v1/completions", json=asked, headers=headers)
        assert reply.status_code == 200, reply.text
        said[reply.json()["id"]] = reply.json()["usage"]["completion_tokens"]
        return reply

    with postgres_server() as postgres:
        await postgres.execute("CREATE DATABASE loraplex TEMPLATE template0")
        url = postgres.url("loraplex")
        await upgrade(url)
        options = ["--workers", "3", "--data-dir", str(tmp_path / "data")]
        with api_processes(model_dir, url, redis_server.url, *options) as apis:
            await apis.until(lambda: len(apis.pids()) == 3)
            pids = apis.pids()
            async with contextlib.AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(apis.client(pid)) for pid in pids]
                admin = clients[0]
                (await admin.post("/admin/tenants", json={"name": "acme"})).raise_for_status()
                quota = {"tokens_per_minute": TOKENS_A_MINUTE}
                (await admin.put("/admin/tenants/acme/quota", json=quota)).raise_for_status()
                created = await admin.post("/admin/tenants/acme/keys", json={})
                key: str = created.raise_for_status().json()["key"]
                for client in clients:
                    await ask(client, key)
                postgres.stop()
                for client in clients * 2:
                    await ask(client, key)
                os.kill(pids[0], signal.SIGKILL)  # its calls are for another to write
                await apis.until(lambda: '"usage_adopted"' in apis.log())
            apis.service.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(apis.service.process.wait, 60) == 0, apis.log()
        stopped_at = datetime.now(UTC)
        assert len(list(spilled.glob("*.jsonl"))) >= 2
        (spilled / "0.jsonl").write_bytes(b'{"request_id": "cut sho')

        postgres.start()
        redis_server.flush()  # a new minute for the rates
        registry = Registry(Database(url))
        with api_processes(model_dir, url, redis_server.url, *options) as apis:
            await apis.until(lambda: not list(spilled.glob("*.jsonl")))
            rows = await registry.list_usage("acme", 1000)
            assert len(rows) == len(said) == 9
            assert {row.request_id: row.output_tokens for row in rows} == said
            assert all(row.created_at and row.created_at < stopped_at for row in rows)
            assert [left.name for left in spilled.iterdir()] == ["0.damaged"]
            async with apis.client(apis.pids()[0]) as client:
                left = (await ask(client, key)).headers["x-ratelimit-remaining-tokens"]
            assert int(left) == TOKENS_A_MINUTE - 3 - 4, "rows that came late were charged again"
        await registry.close()
