"""Telemetry over the engine's socket: for clients, and for those who only watch."""

import asyncio

import pytest
from structlog.testing import capture_logs

from engine.errors import EngineUnavailable
from engine.messages import EngineRequest, Forget, Generate
from engine.telemetry.records import Cursor, GetTelemetry, Telemetry
from engine.transport.zmq_client import ZmqEngineClient
from tests.support.engine_server import RawClient, server_thread
from tests.support.scripted_engine import (
    EOS,
    ScriptedRunner,
    digest_of,
    put_fake_adapter,
    request,
)
from tests.support.waiting import SECONDS, eventually

pytestmark = pytest.mark.anyio


def answers() -> ScriptedRunner:
    return ScriptedRunner(lambda prompt, adapter: [7, EOS])


def labelled(number: int) -> EngineRequest:
    plain = request(number, [1, 2], adapter=None if number % 2 else digest_of(1))
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
    return EngineRequest(**{**fields, "label": "legal@1", "call": f"call-{number}"})


async def fetch(digest: str) -> None:
    raise AssertionError("nothing is fetched")


def ask(client: RawClient, **question: object) -> Telemetry:
    client.send(GetTelemetry(call_id=7, **question))  # type: ignore[arg-type]
    return client.receive(Telemetry)


def test_whoever_only_watches_is_answered_and_given_no_work():
    with server_thread(answers()) as server:
        worker, watcher = server.joined_client(), server.client()
        worker.send(Generate(labelled(1)))
        worker.receive_last(1)
        told = ask(watcher, with_totals=True)
        assert (told.call_id, told.generation) == (7, 1)
        assert [record.call for record in told.requests] == ["call-1"]
        assert told.totals is not None and told.totals.steps == len(told.steps) > 0
        assert ask(watcher, cursor=told.cursor).requests == []
        assert watcher.stats().stats.output_tokens == 2
        assert len(server.server._peers) <= 1, "it is no client"


def test_a_deleted_adapter_is_told_among_all_others_from_then_on():
    with server_thread(answers()) as server:
        client = server.joined_client()
        put_fake_adapter(server.cache_dir, digest_of(1))
        client.send(Generate(labelled(2)))
        client.receive_last(2)
        before = ask(client, with_totals=True).totals
        client.send(Forget("acme", "legal"))
        after = ask(client, with_totals=True).totals
    assert before is not None and after is not None
    assert {(t.tenant, t.adapter): t.requests for t in before.adapters if t.requests} == {
        ("acme", "legal"): {"stop": 1}
    }
    assert {(t.tenant, t.adapter): t.requests for t in after.adapters} == {("", None): {"stop": 1}}


async def test_what_the_service_refused_is_counted_with_the_engines_own_refusals():
    with server_thread(answers()) as server:
        client = ZmqEngineClient(server.socket_path, fetch, beat_seconds=0.02)
        client.note_refusal("acme", "legal", "request_rate_exceeded")  # not there yet: kept
        await client.start()
        try:
            await client.wait_ready(SECONDS)
            client.note_refusal("acme", None, "token_rate_exceeded")
            for _ in range(2):
                client.note_refusal("acme", "legal", "request_rate_exceeded")
            counts: dict[str | None, dict[str, int]] = {}
            async with asyncio.timeout(SECONDS):
                while sum(sum(refused.values()) for refused in counts.values()) < 4:
                    told = await client.telemetry(with_totals=True)
                    assert told.totals is not None
                    counts = {t.adapter: t.refused for t in told.totals.adapters if t.tenant}
        finally:
            await client.close()
    assert counts == {"legal": {"request_rate_exceeded": 3}, None: {"token_rate_exceeded": 1}}


async def test_what_was_refused_last_is_told_before_a_client_ends():
    with server_thread(answers()) as server:
        client = ZmqEngineClient(server.socket_path, fetch, beat_seconds=600.0)
        await client.start()
        await client.wait_ready(SECONDS)
        client.note_refusal("acme", "legal", "request_rate_exceeded")
        await client.close()
        watcher = server.client()
        await eventually(lambda: not server.server._peers)
        told = await asyncio.to_thread(ask, watcher, with_totals=True)
    assert told.totals is not None
    assert [(t.adapter, t.refused) for t in told.totals.adapters if t.tenant] == [
        ("legal", {"request_rate_exceeded": 1})
    ]


async def test_a_client_that_ends_is_not_lost():
    with capture_logs() as logs, server_thread(answers()) as server:
        client = ZmqEngineClient(server.socket_path, fetch)
        await client.start()
        await client.wait_ready(SECONDS)
        stream = await client.generate(labelled(1))
        assert [output.finished async for output in stream][-1]
        await client.close()
        await eventually(lambda: not server.server._peers)
    said = [entry["event"] for entry in logs]
    assert "client_left" in said and "client_lost" not in said


async def test_a_client_reads_on_from_its_cursor_and_is_told_when_the_engine_is_away():
    with server_thread(answers()) as server:
        client = ZmqEngineClient(server.socket_path, fetch, stats_timeout=SECONDS)
        await client.start()
        try:
            with pytest.raises(EngineUnavailable):
                await client.telemetry()  # it has not been welcomed yet
            await client.wait_ready(SECONDS)
            for number in (1, 3, 5):
                async for _ in await client.generate(labelled(number)):
                    pass
            first = await client.telemetry(limit=2)
            rest = await client.telemetry(first.cursor)
            assert [r.call for r in (*first.requests, *rest.requests)] == [
                "call-1", "call-3", "call-5",
            ]  # fmt: skip
            assert first.has_more and not rest.has_more and rest.totals is None
            of_older = await client.telemetry(Cursor(generation=9, requests=3))
            assert len(of_older.requests) == 3 and of_older.cursor.generation == 1
        finally:
            await client.close()
        with pytest.raises(EngineUnavailable):
            await client.telemetry()
