"""Usage of a call has one row, whichever API process writes it, and the engine hears of it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from engine.errors import RequestRefused
from engine.messages import CallUsage, RequestTiming
from tests.support.fake_engine import FakeEngine
from tests.support.service import TestService, running_service

pytestmark = pytest.mark.anyio

LEFT = CallUsage(
    call="cmpl-left", tenant="acme", label="le.gal@12", is_base=False, prompt_tokens=9,
    cached_tokens=4, output_tokens=5, finish_reasons=["abort", "length"],
    timing=RequestTiming(queue={"load": 0.25, "turn": 0.5}, prefill=1.0, decode=2.0),
)  # fmt: skip
ASKED = {"model": "base", "prompt": "x", "max_tokens": 4}


async def until_settled(service: TestService, number: int) -> list[str]:
    async with asyncio.timeout(10):
        while len(service.engine.settled) < number:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.005)
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
