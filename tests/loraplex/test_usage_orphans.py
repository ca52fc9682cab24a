"""Usage of a call has one row, whichever API process writes it, and the engine hears of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.records import UsageRecord
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from engine.errors import RequestRefused
from engine.messages import CallUsage, RequestTiming
from tests.support.fake_engine import FakeEngine
from tests.support.service import TestService, running_service
from tests.support.waiting import SECONDS, eventually

pytestmark = pytest.mark.anyio

LEFT = CallUsage(
    call="cmpl-left", tenant="acme", label="le.gal@12", is_base=False, prompt_tokens=9,
    cached_tokens=4, output_tokens=5, finish_reasons=["abort", "length"],
    timing=RequestTiming(queue={"load": 0.25, "turn": 0.5}, prefill=1.0, decode=2.0),
)  # fmt: skip
ASKED = {"model": "base", "prompt": "x", "max_tokens": 4}


@contextlib.asynccontextmanager
async def _closing(registry: Registry) -> AsyncIterator[Registry]:
    try:
        yield registry
    finally:
        await registry.close()


async def until_settled(service: TestService, number: int) -> list[str]:
    await eventually(lambda: len(service.engine.settled) >= number)
    return service.engine.settled


async def test_a_call_is_settled_once_its_row_is_written(tmp_path: Path):
    engine = FakeEngine(lambda request: [5, 6])
    async with running_service(tmp_path, engine) as service, service.client() as client:
        reply = (await client.post("/v1/completions", json=ASKED)).raise_for_status().json()
        settled = await until_settled(service, 1)
        [row] = await service.registry.list_usage("acme")
        assert [request.call for request in engine.requests.values()] == [row.request_id]
        assert settled == [row.request_id] == [reply["id"]]


async def test_prompts_of_one_call_are_one_call_to_the_engine_too(tmp_path: Path):
    engine = FakeEngine(lambda request: [5, 6])
    async with running_service(tmp_path, engine) as service, service.client() as client:
        asked = {**ASKED, "prompt": ["x", "y", "z"]}
        reply = (await client.post("/v1/completions", json=asked)).raise_for_status().json()
        assert [r.call for r in engine.requests.values()] == [reply["id"]] * 3


async def test_a_refused_call_is_settled_without_a_row(tmp_path: Path):
    engine = FakeEngine()
    engine.refusal = RequestRefused("queue_full", "too many wait")
    async with running_service(tmp_path, engine) as service, service.client() as client:
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 429
        assert len(await until_settled(service, 1)) == 1
        assert await service.registry.list_usage("acme") == []


async def test_calls_that_another_process_left_get_one_row_each(tmp_path: Path, registry_url: str):
    async with running_service(tmp_path, database_url=registry_url) as service:
        base = msgspec.structs.replace(LEFT, call="cmpl-base", is_base=True, timing=None)
        service.engine.leave([LEFT, base])
        assert await until_settled(service, 2) == ["cmpl-left", "cmpl-base"]
        service.engine.leave([msgspec.structs.replace(LEFT, output_tokens=99)])  # by the slow one
        await until_settled(service, 3)
        rows = {row.request_id: row for row in await service.registry.list_usage("acme")}
        assert len(rows) == 2
        row = rows["cmpl-left"]
        assert (row.tenant, row.adapter, row.version) == ("acme", "le.gal", 12)
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (9, 4, 5)
        assert (row.queue_seconds, row.load_seconds, row.decode_seconds) == (0.75, 0.25, 2.0)
        assert row.finish_reason == "abort,length"
        row = rows["cmpl-base"]
        assert (row.adapter, row.version, row.queue_seconds) == (None, None, 0.0)


async def test_a_call_of_a_tenant_that_is_gone_holds_up_nobody(tmp_path: Path):
    async with running_service(tmp_path) as service:
        service.engine.leave([msgspec.structs.replace(LEFT, tenant="gone", call="other"), LEFT])
        assert await until_settled(service, 2) == ["other", "cmpl-left"]
        assert [r.request_id for r in await service.registry.list_usage("acme")] == ["cmpl-left"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "n": 3}])
async def test_who_has_seen_the_last_frame_finds_the_usage(
    tmp_path: Path, registry_url: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("loraplex.usage._WAIT_SECONDS", SECONDS)
    engine = FakeEngine(lambda request: [5, 6])
    async with running_service(tmp_path, engine, database_url=registry_url) as service:
        other = Registry(Database(registry_url))  # as another API process reads it
        async with service.client() as client, _closing(other):
            for number in range(1, 6):
                async with client.stream(
                    "POST", "/v1/completions", json={**ASKED, **fields}
                ) as reply:
                    seen = b""
                    async for chunk in reply.aiter_bytes():
                        seen += chunk
                        if not fields or b"[DONE]" in seen:  # whatever of the connection is left
                            assert len(await other.list_usage("acme")) == number
                assert not fields or b"[DONE]" in seen


async def test_a_call_that_the_engine_gives_up_has_its_usage_before_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("loraplex.usage._WAIT_SECONDS", SECONDS)
    engine = FakeEngine()
    async with running_service(tmp_path, engine) as service, service.client() as client:
        asked = {**ASKED, "stream": True}
        async with client.stream("POST", "/v1/completions", json=asked) as reply:
            engine.break_down(1, "sampling_failed")
            text = (await reply.aread()).decode()
        assert '"sampling_failed"' in text and "[DONE]" not in text
        [row] = await service.registry.list_usage("acme")
        assert row.finish_reason == "error"


async def test_a_slow_database_holds_up_a_reply_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("loraplex.usage._WAIT_SECONDS", 0.05)
    goes_on = asyncio.Event()
    async with running_service(tmp_path, FakeEngine(lambda request: [5, 6])) as service:
        record = service.registry.record_usage

        async def slowly(*rows: UsageRecord) -> None:
            await goes_on.wait()
            await record(*rows)

        monkeypatch.setattr(service.registry, "record_usage", slowly)
        async with service.client() as client:
            for fields in ({}, {"stream": True}):
                reply = await client.post("/v1/completions", json={**ASKED, **fields})
                assert reply.status_code == 200
        assert await service.registry.list_usage("acme") == []
        goes_on.set()
        await until_settled(service, 2)
        assert len(await service.registry.list_usage("acme")) == 2


async def test_a_database_that_is_away_holds_up_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_away = True
    async with running_service(tmp_path, FakeEngine(lambda request: [5, 6])) as service:
        record = service.registry.record_usage

        async def fails(*rows: UsageRecord) -> None:
            if is_away:
                raise RegistryUnavailable("away")
            await record(*rows)

        monkeypatch.setattr(service.registry, "record_usage", fails)
        monkeypatch.setattr("loraplex.usage._WAIT_SECONDS", 60.0)
        async with service.client() as client, asyncio.timeout(55):
            for _ in range(3):
                reply = await client.post("/v1/completions", json=ASKED)
                assert reply.status_code == 200
        is_away = False
        await until_settled(service, 3)
        assert len(await service.registry.list_usage("acme")) == 3
