"""A full queue over HTTP: 429 before a stream begins, for that queue only, and when to return."""

import asyncio

import pytest

from adapter_store.blobs import LocalBlobStore
from engine.config import SchedulerConfig
from engine.errors import EngineUnavailable, RequestRefused
from engine.scheduling.backpressure import Congestion
from engine.transport.inline_client import InlineEngineClient
from loraplex.adapter_cache import fetch_from
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_engine import ScriptedRunner, endless, scripted_parts
from tests.support.service import running_service

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["adapter_queue_full", "tenant_queue_full", "queue_full"])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(tmp_path, code, stream):
    engine = FakeEngine()
    engine.refusal = RequestRefused(code, "full", limit=8, congestion=Congestion(9, 2.5, 3.2))
    async with running_service(tmp_path, engine) as service, service.client() as client:
        asked = {"model": "base", "prompt": "x", "stream": stream}
        reply = await client.post("/v1/completions", json=asked)
        assert reply.status_code == 429
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["error"] == {
            "message": "full", "type": "rate_limit_error", "param": None, "code": code,
        }  # fmt: skip
        assert reply.headers["retry-after"] == "4"
        assert reply.headers["x-loraplex-queue-limit"] == "8"
        length = reply.headers.get("x-loraplex-queue-length")
        rate = reply.headers.get("x-loraplex-queue-drain-per-second")
        # How busy all tenants are together is nobody's to know.
        assert (length, rate) == ((None, None) if code == "queue_full" else ("9", "2.500"))
        engine.refusal = RequestRefused(code, "the engine's inbox is full")
        reply = await client.post("/v1/completions", json=asked)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        engine.refusal = EngineUnavailable("gone")
        assert (await client.post("/v1/completions", json=asked)).status_code == 503


async def test_one_tenants_flood_is_refused_and_nobody_elses_call_is(tmp_path):
    config = SchedulerConfig(
        num_kv_blocks=64, max_num_seqs=2, max_loras=2, max_model_len=256,
        max_queued_per_tenant=4, max_queued_per_adapter=3,
    )  # fmt: skip
    runner = ScriptedRunner(endless)
    parts = scripted_parts(runner, tmp_path / "cache", config=config)
    (tmp_path / "blobs").mkdir()
    fetch = fetch_from(LocalBlobStore(tmp_path / "blobs"), tmp_path / "cache")
    async with (
        InlineEngineClient(parts, fetch) as engine,
        running_service(tmp_path, engine) as service,
        service.client() as acme,
        service.client("zen:inference") as zen,
    ):
        await service.upload("legal")

        async def ask(client, model: str, max_tokens: int) -> tuple[int, str | None]:
            asked = {"model": model, "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
            reply = await client.post("/v1/completions", json=asked)
            code = None if reply.is_success else reply.json()["error"]["code"]
            if reply.status_code == 429:
                assert 1 <= int(reply.headers["retry-after"]) <= 60
            return reply.status_code, code

        flood = [asyncio.create_task(ask(acme, "legal", 100)) for _ in range(12)]
        flood += [asyncio.create_task(ask(acme, "base", 100)) for _ in range(12)]
        others = [asyncio.create_task(ask(zen, "base", 2)) for _ in range(3)]
        assert await asyncio.gather(*others) == [(200, None)] * 3
        outcomes = await asyncio.gather(*flood)
        assert {status for status, _ in outcomes} == {200, 429}
        assert {code for _, code in outcomes} <= {None, "adapter_queue_full", "tenant_queue_full"}
        assert await ask(acme, "legal", 2) == (200, None)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        parts.core.check_integrity()
        assert len(await service.usage(num_rows=4)) >= 4
