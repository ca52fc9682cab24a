"""The engine killed under load: every call hears of it at once, and the next engine comes warm."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from adapter_store.registry.records import UsageRecord
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service
from loraplex.supervisor.data_dir import DataDir
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

pytestmark = pytest.mark.anyio

ADAPTERS = ("pinned", "warm", "used", "cold")
ENGINE = [
    "--dtype", "float32", "--max-num-seqs", "4", "--threads", "1", "--num-kv-blocks", "256",
    "--max-loras", "2", "--drain-seconds", "2", "--max-queued-per-tenant", "24",
]  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "smollm", max_position_embeddings=4096)


@dataclass
class Bench:
    service: DemoService
    admin: httpx.AsyncClient
    tenant: httpx.AsyncClient

    async def stats(self) -> dict[str, Any]:
        return (await self.admin.get("/admin/engine")).raise_for_status().json()

    async def complete(
        self, model: str, max_tokens: int = 8, *, deadline: float = 60.0, **fields: Any
    ) -> httpx.Response:
        asked = {
            "model": model, "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True,
            "temperature": 0, **fields,
        }  # fmt: skip
        headers = {"x-request-timeout": f"{deadline:g}"}
        return await self.tenant.post("/v1/completions", json=asked, headers=headers)

    async def text(self, model: str) -> str:
        reply = (await self.complete(model)).raise_for_status()
        return reply.json()["choices"][0]["text"]

    async def ending(self, model: str, *, stream: bool) -> str:
        """The code with which a call that would last for long ends."""
        reply = await self.complete(model, 3000, stream=stream)
        if not stream:
            assert reply.status_code == 503
            return reply.json()["error"]["code"]
        assert reply.status_code == 200
        events = [e.removeprefix("data: ") for e in reply.text.split("\n\n") if e[:5] == "data:"]
        assert "[DONE]" not in events
        return json.loads(events[-1])["error"]["code"]

    async def readiness(self) -> list[str]:
        """What the service says of its engine, without repetitions, until it is ready."""
        seen: list[str] = []
        async with asyncio.timeout(120):
            while True:
                reply = await self.admin.get("/health/ready")
                status = reply.json()["engine"]
                assert (reply.status_code == 200) == (status == "ok")
                if seen[-1:] != [status]:
                    seen.append(status)
                if status == "ok":
                    return seen
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(model_dir: Path, data_dir: Path, *options: str) -> AsyncIterator[Bench]:
    arguments = [*ENGINE, "--data-dir", str(data_dir), *options]
    with demo_service(model_dir, "base", arguments) as service:
        headers = {"authorization": f"Bearer {service.admin_key}"}
        async with (
            httpx.AsyncClient(base_url=service.url, headers=headers, timeout=60) as admin,
            httpx.AsyncClient(
                base_url=f"{service.url}/t/acme", headers=headers, timeout=60,
                limits=httpx.Limits(max_connections=100),
            ) as tenant,
        ):  # fmt: skip
            yield Bench(service, admin, tenant)


async def set_up(b: Bench, root: Path, model_dir: Path) -> dict[str, str]:
    """A tenant with adapters, some kept and some used; returns their digests."""
    (await b.admin.post("/admin/tenants", json={"name": "acme"})).raise_for_status()
    digests: dict[str, str] = {}
    with ApiClient(f"{b.service.url}/t/acme", b.service.admin_key) as api:
        for seed, name in enumerate(ADAPTERS):
            folder = make_tiny_adapter(root / name, model_dir, seed=seed)
            digests[name] = (await asyncio.to_thread(api.push_adapter, name, folder))["digest"]
    for name in ("pinned", "warm"):
        path = f"/v1/adapters/{name}/residency"
        (await b.tenant.put(path, json={"residency": name})).raise_for_status()
    return digests


def engine_of(service: DemoService) -> psutil.Process:
    children = psutil.Process(service.process.pid).children()
    [engine] = [child for child in children if "engine.process" in child.cmdline()]
    return engine


async def failed_calls(data_dir: Path, number: int) -> list[UsageRecord]:
    """Their rows, once there are so many."""
    registry = Registry(Database(DataDir(data_dir).database_url))
    try:
        async with asyncio.timeout(60):
            while True:
                rows = await registry.list_usage("acme", 1000)
                failed = [row for row in rows if row.finish_reason == "error"]
                if len(failed) >= number:
                    return failed
                await asyncio.sleep(0.01)
    finally:
        await registry.close()


def check_residents(stats: dict[str, Any], digests: dict[str, str]) -> None:
    assert stats["resident"] == [digests["pinned"]] == stats["pinned"]
    assert stats["warm"] == [digests["warm"]] and not stats["warming"]
    assert stats["host_adapters"] == 3, "pinned, warm, and the one used last; not the cold one"


async def test_a_killed_engine_is_replaced_by_one_that_has_loaded_what_it_needs(
    model_dir: Path, tmp_path: Path
):
    data_dir = tmp_path / "data"
    async with running(model_dir, data_dir) as b:
        digests = await set_up(b, tmp_path, model_dir)
        texts = {name: await b.text(name) for name in ("pinned", "warm", "used", "base")}
        assert len(set(texts.values())) == 4
        await b.text("used")  # the last one to be used before the crash
        late = await b.complete("base", 3000, deadline=0.2)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")

        calls = [
            asyncio.create_task(b.ending(model, stream=stream))
            for model in ("pinned", "used", "base")
            for stream in (True, False)
            for _ in range(4)
        ]
        async with asyncio.timeout(60):
            while (await b.stats())["waiting"] < len(calls) - 4:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert not any(call.done() for call in calls)
        beyond = [asyncio.create_task(b.complete("base", 3000)) for _ in range(8)]
        done, _ = await asyncio.wait(beyond, return_when=asyncio.FIRST_COMPLETED)
        for refused in map(asyncio.Task.result, done):
            assert refused.json()["error"]["code"] == "tenant_queue_full"
            assert (refused.status_code, refused.headers["x-loraplex-queue-limit"]) == (429, "24")
            assert 1 <= int(refused.headers["retry-after"]) <= 60

        engine_of(b.service).kill()
        endings = await asyncio.gather(*calls)
        refused = await b.complete("base")  # so they did not wait for the next engine
        seen = await b.readiness()
        assert set(endings) == {"engine_unavailable"}
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert seen[0] == "unavailable" and seen[-1] == "ok"
        assert {reply.status_code for reply in await asyncio.gather(*beyond)} == {429, 503}
        # What was generated is written, whatever became of the call.
        rows = await failed_calls(data_dir, len(calls))
        assert sum(row.output_tokens > 0 for row in rows) >= 4
        check_residents(await b.stats(), digests)
        reply = await b.complete("pinned")
        assert float(reply.headers["x-loraplex-load-ms"]) == 0.0
        for name, text in texts.items():
            assert await b.text(name) == text
        stats = await b.stats()
        assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
        await b.text("used")

    async with running(model_dir, data_dir) as b:  # the whole service, started again
        check_residents(await b.stats(), digests)
        assert await b.text("pinned") == texts["pinned"]


@pytest.mark.slow
async def test_an_engine_that_stands_still_is_not_ready_before_it_is_killed_and_replaced(
    model_dir: Path, tmp_path: Path
):
    async with running(model_dir, tmp_path / "data", "--hang-seconds", "5") as b:
        (await b.admin.post("/admin/tenants", json={"name": "acme"})).raise_for_status()
        calls = [asyncio.create_task(b.ending("base", stream=stream)) for stream in (True, False)]
        async with asyncio.timeout(60):
            while (await b.stats())["running"] < len(calls):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        engine = engine_of(b.service)
        engine.suspend()
        async with asyncio.timeout(60):
            while True:
                reply = await b.admin.get("/health/ready")
                if reply.status_code != 200:
                    break
                await asyncio.sleep(0.01)
        assert reply.json()["engine"] == "unavailable"
        assert engine.status() == psutil.STATUS_STOPPED, "it was not ready only once it was killed"
        assert set(await asyncio.gather(*calls)) == {"engine_unavailable"}
        assert (await b.readiness())[-1] == "ok"
        assert not engine.is_running()
        assert (await b.complete("base")).status_code == 200
