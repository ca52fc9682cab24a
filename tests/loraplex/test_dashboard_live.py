"""Live events: one source for all viewers, what each may see, and what becomes of slow ones."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.registry import Registry
from engine.engine_stats import QueueStats
from engine.telemetry.records import Cursor, Telemetry
from loraplex.dashboard.live import UNCHECKED_SECONDS, LiveSource
from loraplex.dashboard.live_stream import MAX_QUEUED, LiveStream
from loraplex.dashboard.sessions import Sessions, Viewer
from tests.support.dashboard import dashboard
from tests.support.fake_engine import FakeEngine
from tests.support.fake_engine import info as engine_info
from tests.support.records import NOW, ToldEngine, request_record, stats, step_record
from tests.support.registry import open_registry

pytestmark = pytest.mark.anyio

TICK = 0.01


class WatchedEngine(FakeEngine):
    """A fake whose records a test tells."""

    def __init__(self) -> None:
        super().__init__()
        self.told = ToldEngine()
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def stats(self) -> Any:
        await self.hangs.wait()
        return await self.told.stats()

    async def telemetry(
        self, cursor: Cursor | None = None, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        return await self.told.telemetry(cursor or Cursor(), limit=limit, with_totals=with_totals)


class AllGood(Sessions):
    """Sessions that never end."""

    async def ended(self, token_hashes: Any) -> dict[str, Any]:
        return {}


@asynccontextmanager
async def source(root: Path) -> AsyncIterator[tuple[LiveSource, WatchedEngine, Registry]]:
    async with open_registry(root) as registry:
        engine = WatchedEngine()
        sessions = AllGood(registry, None)
        async with LiveSource(
            engine, registry.database, sessions, clock=lambda: NOW, seconds=TICK
        ) as live:
            yield live, engine, registry


def viewer(tenant: str | None = None) -> Viewer:
    return Viewer("0" * 64, tenant, NOW + 100)


async def next_event(stream: LiveStream, kind: str) -> Any:
    """The next event of a kind."""
    async with asyncio.timeout(10):
        while True:
            data = await stream.next(10)
            assert data is not None
            for part in data.split(b"\n\n"):
                name, _, body = part.partition(b"\ndata: ")
                if name == b"event: " + kind.encode():
                    return json.loads(body)


async def test_fifty_viewers_cost_the_engine_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with source(tmp_path) as (live, engine, _):
        streams = [live.open(viewer("acme" if n % 2 else None), frozenset()) for n in range(50)]
        for stream in streams:
            await next_event(stream, "live")
        told: list[bytes] = []
        monkeypatch.setattr(streams[0], "put", told.append)
        before = engine.told.num_asked
        for stream in streams[1:]:
            for _ in range(2):
                await next_event(stream, "live")
        assert engine.told.num_asked - before <= len(told) + 1  # by the tick, not by the viewer
        for stream in streams:
            live.close(stream)
        assert live.num_streams == 0


async def test_who_comes_when_nobody_looked_is_watched_too(tmp_path: Path):
    """The checks of sessions end and begin apart from the events."""
    async with source(tmp_path) as (live, _, registry):
        sessions = Sessions(registry, "the-admin-key")
        live._sessions = sessions
        for _ in range(3):
            stream = live.open(viewer(), frozenset())  # a session that there is not
            assert (await next_event(stream, "ended"))["reason"] == "logged_out"
            live.close(stream)


async def test_nobody_looks_nobody_asks(tmp_path: Path):
    async with source(tmp_path) as (live, engine, _):
        stream = live.open(viewer(), frozenset())
        await next_event(stream, "live")
        live.close(stream)
        await asyncio.wait(live._tasks.values(), timeout=10)
        asked = engine.told.num_asked
        await asyncio.sleep(5 * TICK)
        assert engine.told.num_asked == asked
        stream = live.open(viewer(), frozenset())  # and somebody looks again
        await next_event(stream, "live")
        assert engine.told.num_asked > asked


async def test_a_viewer_sees_the_last_ten_seconds_of_its_own(tmp_path: Path):
    async with source(tmp_path) as (live, engine, _):
        engine.told.tell(
            [
                request_record(),
                request_record(tenant="zen", ttft=3.0, seconds=3.0, arrived=NOW - 4),
                request_record(arrived=NOW - 60),
            ],
            [step_record(NOW - 1)],
        )
        engine.told.stats_now = stats(
            [
                QueueStats(
                    tenant="zen", adapter="d" * 64, label="x@1", waiting=4, running=1,
                    cause="slot", waited={},
                )
            ]
        )  # fmt: skip
        mine = await next_event(live.open(viewer("acme"), frozenset()), "live")
        assert (mine["requests_rate"], mine["goodput_share"]) == (0.1, 1.0)
        assert (mine["waiting"], mine["waiting_by_cause"], mine["engine"]) == (0, {}, None)
        assert (mine["prompt_tokens_rate"], mine["output_tokens_rate"]) == (1.2, 0.2)
        everything = await next_event(live.open(viewer(), frozenset()), "live")
        assert (everything["requests_rate"], everything["goodput_share"]) == (0.2, 0.5)
        assert everything["waiting_by_cause"] == {"slot": 4}
        assert everything["engine"]["max_running"] == engine_info().max_num_seqs
        assert everything["engine"]["kv_blocks_used"] == 16


async def test_what_is_shown_is_no_older_for_a_clock_that_is_set_back(tmp_path: Path):
    async with open_registry(tmp_path) as registry:
        now, engine = NOW, WatchedEngine()
        async with LiveSource(
            engine, registry.database, AllGood(registry, None), clock=lambda: now, seconds=10,
        ) as live:  # fmt: skip
            assert await live.live(None) is not None
            now -= 3600.0
            engine.told.stats_now = stats(kv_blocks_used=17)
            shown = await live.live(None)
            assert shown is not None and shown.engine is not None
            assert (shown.at, shown.engine.kv_blocks_used) == (now, 17)


async def test_streams_that_cannot_be_checked_end_after_a_minute(tmp_path: Path):
    class Unchecked(Sessions):
        async def ended(self, token_hashes: Any) -> dict[str, Any]:
            raise RegistryUnavailable("away")

    async with open_registry(tmp_path) as registry:
        now = NOW
        async with LiveSource(
            WatchedEngine(), registry.database, Unchecked(registry, None),
            clock=lambda: now, seconds=TICK,
        ) as live:  # fmt: skip
            stream = live.open(viewer(), frozenset())
            await next_event(stream, "live")
            now += UNCHECKED_SECONDS + 1
            assert (await next_event(stream, "ended"))["reason"] == "stopping"


async def test_steps_and_slots_come_to_those_who_ask_for_them(tmp_path: Path):
    async with source(tmp_path) as (live, engine, _):
        asking = live.open(viewer("acme"), frozenset(("steps", "slots")))
        other = live.open(viewer("acme"), frozenset())
        await next_event(asking, "live")
        engine.told.tell(steps=[step_record(NOW - 1), step_record(NOW)])
        steps = await next_event(asking, "steps")
        assert steps["rows"] == [3, 3]
        assert steps["shares"][0]["adapter"] == "tone"
        assert (await next_event(asking, "slots"))["spans"] == []
        data = await other.next(10)
        assert data is not None and b"event: steps" not in data


async def test_events_go_on_while_the_engine_is_within_a_step_or_gone(tmp_path: Path):
    async with source(tmp_path) as (live, engine, _):
        stream = live.open(viewer(), frozenset())
        assert (await next_event(stream, "live"))["engine_up"]
        engine.hangs.clear()
        for _ in range(3):
            await next_event(stream, "live")
        engine.hangs.set()
        engine.is_ready = False
        engine.told.generation = 0
        for _ in range(MAX_QUEUED + 1):
            last = await next_event(stream, "live")
        assert not last["engine_up"]
        engine.is_ready = True
        engine.told.restart(NOW)
        engine.told.generation = 2
        engine.told.tell([request_record()])
        async with asyncio.timeout(10):
            while (await next_event(stream, "live"))["engine"]["generation"] != "2":
                pass


async def test_a_viewer_that_takes_nothing_loses_the_oldest_events():
    stream = LiveStream(viewer(), frozenset())
    for number in range(MAX_QUEUED + 5):
        stream.put(b"%d," % number)
    data = await stream.next(1)
    assert data is not None and data.split(b",")[0] == b"5"
    assert await stream.next(0.001) == b": heartbeat\n\n"


async def test_at_its_end_a_stream_says_why_and_nothing_else():
    stream = LiveStream(viewer(), frozenset())
    stream.put(b"event: live\ndata: secret\n\n")
    stream.end("revoked")
    stream.put(b"late")
    assert await stream.next(1) == b'event: ended\ndata: {"reason":"revoked"}\n\n'
    assert await stream.next(1) is None


async def test_a_process_that_stops_lets_go_of_its_viewers(tmp_path: Path):
    async with source(tmp_path) as (live, _, _):
        stream = live.open(viewer(), frozenset())
        live.stop()
        late = live.open(viewer(), frozenset())
        for one in (stream, late):
            assert (await next_event(one, "ended"))["reason"] == "stopping"
            assert await one.next(1) is None


async def test_a_viewer_that_goes_away_is_forgotten(tmp_path: Path):
    async with dashboard(tmp_path, engine=WatchedEngine()) as at, at.logged_in() as browser:
        live: LiveSource = at.service.app.state.services.live
        async with browser.stream("GET", "/dashboard/api/events?topics=steps,slots") as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            async for line in reply.aiter_lines():
                if line == "event: alerts":
                    break
            assert live.num_streams == 1
        async with asyncio.timeout(10):
            while live.num_streams:  # noqa: ASYNC110 - the server notices in its own time
                await asyncio.sleep(0.01)


async def test_pages_have_live_figures_without_a_stream(tmp_path: Path):
    engine = WatchedEngine()
    async with dashboard(tmp_path, engine=engine) as at, at.logged_in() as browser:
        engine.told.tell(steps=[step_record()])
        reply = await browser.get("/dashboard/api/overview")
        assert reply.json()["live"]["running"] == 3
        reply = await browser.get("/dashboard/api/batch")
        assert reply.json()["recent"]["rows"] == [3]
        assert isinstance(browser, httpx.AsyncClient)
