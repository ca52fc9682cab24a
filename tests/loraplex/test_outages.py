"""A part is gone: what goes on, what is refused and how, and that it heals by itself."""

import asyncio
import io
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

from adapter_store import disk_space
from adapter_store.errors import RegistryUnavailable
from loraplex.registry_watch import GRACE_SECONDS, RegistryWatch
from tests.support.fake_engine import FakeEngine
from tests.support.registry import FakeClock
from tests.support.scripted_engine import ScriptedRunner
from tests.support.service import adapter_files, running_service
from tests.support.service_on_engine import service_on_engine

pytestmark = pytest.mark.anyio


async def ask(client: httpx.AsyncClient, model: str, **fields: Any) -> tuple[int, str | None]:
    """The status, and the code of an error."""
    body = {"model": model, "prompt": "x", "max_tokens": 2, **fields}
    reply = await client.post("/v1/completions", json=body)
    return reply.status_code, None if reply.is_success else reply.json()["error"]["code"]


async def send(client: httpx.AsyncClient, name: str) -> tuple[int, str | None]:
    """Upload an adapter; as `ask`."""
    config, weights = adapter_files(seed=9)
    reply = await client.post(
        "/v1/adapters", data={"name": name}, files={"config": config, "weights": weights}
    )
    return reply.status_code, None if reply.is_success else reply.json()["error"]["code"]


async def readiness(client: httpx.AsyncClient) -> tuple[int, str]:
    reply = await client.get("/health/ready")
    return reply.status_code, reply.json()["registry"]


async def test_without_its_database_the_service_goes_on_with_what_it_knows_for_a_minute(
    tmp_path: Path, registry_url: str, monkeypatch: pytest.MonkeyPatch
):
    clock = FakeClock()
    engine = FakeEngine(lambda request: [5, 6])
    gone = 503, "registry_unavailable"
    async with (
        running_service(tmp_path, engine, database_url=registry_url) as service,
        service.client() as caller,
        service.client("acme:tenant") as owner,
        service.client("zen:inference") as stranger,
    ):
        for cache in ("_principals", "_routes"):
            kept = getattr(service.registry, cache)
            monkeypatch.setattr(kept, "_monotonic", lambda: clock.monotonic)
        watch = service.app.state.services.registry_watch
        monkeypatch.setattr(watch, "_monotonic", lambda: clock.monotonic)
        await service.upload("known")
        revoked = await service.registry.create_key("acme")
        await service.registry.authenticate(revoked.plain)
        assert await ask(caller, "known") == (200, None)
        await service.registry.revoke_key(revoked.key_id)
        assert await ask(caller, "known") == (200, None)
        assert (await owner.get("/v1/adapters")).status_code == 200
        assert await readiness(caller) == (200, "ok")
        rows = await service.usage(num_rows=2)

        async def away(work: object) -> None:
            raise RegistryUnavailable("no answer")

        with monkeypatch.context() as outage:
            for call in ("read", "write"):
                outage.setattr(service.registry.database, call, away)
            clock.advance(GRACE_SECONDS - 1)
            for model in ("known", "base"):
                assert await ask(caller, model) == (200, None)
            assert await ask(caller, "unheard-of") == gone
            assert await ask(stranger, "base") == gone
            for name in ("new", "known"):  # what failed to change has not changed
                assert await send(owner, name) == gone
                assert await ask(caller, "known") == (200, None)
            assert (await owner.get("/v1/adapters")).json()["error"]["code"] == gone[1]
            headers = {"authorization": f"Bearer {revoked.plain}"}
            assert (await caller.get("/v1/models", headers=headers)).status_code == 503
            assert await readiness(caller) == (200, "degraded")
            clock.advance(2.0)
            assert await ask(caller, "known") == gone
            assert await readiness(caller) == (503, "unavailable")
            assert (await caller.get("/health/live")).status_code == 200
            assert list((tmp_path / "uploads").iterdir()) == []

        assert await ask(caller, "known") == (200, None)
        assert await readiness(caller) == (200, "ok")
        assert (await caller.get("/v1/models", headers=headers)).status_code == 401
        assert await send(owner, "new") == (201, None)
        async with asyncio.timeout(20):
            while len(await service.registry.list_usage("acme")) < len(rows) + 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        rows = await service.registry.list_usage("acme")
        assert len({row.request_id for row in rows}) == len(rows) == 7


class AskedRegistry:
    """Answers a ping when told; until then whoever asks waits."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.answers = asyncio.Event()
        self.is_gone = False

    async def ping(self) -> None:
        self.num_asked += 1
        if self.is_gone:
            raise RegistryUnavailable("no answer")
        await self.answers.wait()

    def watch(self, **settings: Any) -> RegistryWatch:
        registry: Any = self
        return RegistryWatch(registry, **settings)


async def test_a_database_that_never_answered_is_no_ground_to_be_ready():
    registry = AskedRegistry()
    registry.is_gone = True
    async with registry.watch() as watch:
        assert await watch.status() == "unavailable"
        registry.is_gone = False
    async with registry.watch(answer_seconds=0.0) as watch:
        assert await watch.status() == "unavailable"
        registry.answers.set()
        assert await watch.status() == "ok"


async def test_the_first_answer_of_a_database_is_waited_for_by_all_pages_at_once():
    registry = AskedRegistry()
    async with registry.watch(page_seconds=0.0) as watch:
        pages = [asyncio.create_task(watch.status()) for _ in range(3)]
        await anyio.wait_all_tasks_blocked()
        assert not any(page.done() for page in pages)
        registry.answers.set()
        assert await asyncio.gather(*pages) == ["ok", "ok", "ok"]
        assert registry.num_asked == 1


async def test_a_database_that_answers_slowly_is_degraded_and_no_page_waits_for_it():
    clock, registry = FakeClock(), AskedRegistry()
    registry.answers.set()
    async with registry.watch(page_seconds=0.0, monotonic=lambda: clock.monotonic) as watch:
        assert await watch.status() == "ok"
        for _ in range(3):
            registry.answers.clear()
            clock.advance(GRACE_SECONDS - 1)
            asked = registry.num_asked
            assert [await watch.status(), await watch.status()] == ["degraded", "degraded"]
            assert registry.num_asked == asked + 1, "no question was asked beside the first"
            registry.answers.set()
            await anyio.wait_all_tasks_blocked()  # the answer comes when no page waits any more
        registry.answers.clear()
        clock.advance(GRACE_SECONDS)
        assert await watch.status() == "unavailable"


async def test_without_the_blob_store_adapters_on_the_disk_are_served_and_others_are_a_503(
    tmp_path: Path,
):
    gone = 503, "adapter_unavailable"
    async with (
        service_on_engine(tmp_path, ScriptedRunner()) as (service, _, fetched),
        service.client() as caller,
        service.client("acme:tenant") as owner,
    ):
        digest = (await service.upload("resident", seed=1))["digest"]
        await service.upload("cold", seed=2)
        assert await ask(caller, "resident") == (200, None)
        blobs, elsewhere = tmp_path / "blobs", tmp_path / "elsewhere"
        blobs.rename(elsewhere)
        blobs.write_text("not a folder")
        for _ in range(2):
            assert await ask(caller, "resident") == (200, None)
            assert await ask(caller, "cold") == gone
            assert await ask(caller, "base") == (200, None)
        assert await send(owner, "new") == gone
        assert await readiness(caller) == (200, "ok")
        listed = (await owner.get("/v1/adapters")).json()["data"]
        assert [adapter["name"] for adapter in listed] == ["cold", "resident"]
        blobs.unlink()
        elsewhere.rename(blobs)
        assert await ask(caller, "cold") == (200, None)
        assert await send(owner, "new") == (201, None)
        assert fetched.count(digest) == 1


async def test_a_disk_that_takes_no_file_of_an_upload_is_a_503_of_that_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_config.json", "{}")
        archive.writestr("adapter_model.safetensors", bytes(500_000))
    # Room for what comes, not for what it unpacks to.
    room = SimpleNamespace(f_frsize=1, f_blocks=20_000, f_bavail=100_000)
    async with running_service(tmp_path) as service, service.client("acme:tenant") as owner:
        with monkeypatch.context() as patch:
            patch.setattr(disk_space.os, "statvfs", lambda folder: room)
            full = await owner.post(
                "/v1/adapters", data={"name": "new"}, files={"archive": packed.getvalue()}
            )
        assert (full.status_code, full.json()["error"]["code"]) == (503, "upload_storage")
        assert not any((tmp_path / "uploads").iterdir())
        (tmp_path / "uploads").rmdir()
        assert await send(owner, "new") == (503, "upload_storage")
        (tmp_path / "uploads").mkdir()
        assert await send(owner, "new") == (201, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_the_engine_a_call_is_a_503_before_anything_is_streamed(
    tmp_path: Path, stream: bool
):
    async with (
        running_service(tmp_path, FakeEngine(lambda request: [5, 6])) as service,
        service.client() as caller,
    ):
        service.engine.die()
        assert await ask(caller, "base", stream=stream) == (503, "engine_unavailable")
        assert (await caller.get("/health/ready")).status_code == 503
        assert (await service.upload("a"))["version"] == 1
        assert await service.registry.list_usage("acme") == []
        service.engine.restart()
        for model in ("base", "a"):
            assert await ask(caller, model, stream=stream) == (200, None)
        assert (await caller.get("/health/ready")).status_code == 200
