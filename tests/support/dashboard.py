"""A dashboard as a browser reads it: a cookie, an origin, and what the recorder has written."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from adapter_store.registry.registry import Registry
from engine.telemetry.records import RequestRecord, SlotEvent, StepRecord, StepShare
from loraplex.recorder.recorder import Recorder
from loraplex.recorder.standings import Standings
from loraplex.recorder.store import RollupStore
from loraplex.recorder.traffic import Subject
from loraplex.recorder.widths import SPANS
from tests.support.fake_engine import FakeEngine
from tests.support.records import ToldEngine, request_record, step_record
from tests.support.service import TestService, no_certificates, running_service


@dataclass
class Recording:
    """Plays the recorder's process on a registry, with its real clock."""

    registry: Registry
    engine: ToldEngine = field(default_factory=ToldEngine)
    run: str = "run-1"

    async def record(
        self,
        requests: Sequence[RequestRecord] = (),
        steps: Sequence[StepRecord] = (),
        events: Sequence[SlotEvent] = (),
    ) -> set[Subject]:
        """Read these from an engine, write them, and bring the tables up to date."""
        self.engine.started = time.time() - 120
        self.engine.tell(requests, steps, events)
        database = self.registry.database
        recorder = Recorder(self.engine, RollupStore(database), self.run)
        await recorder.start()
        assert await recorder.read()
        versions = await recorder.write()
        standings = Standings(database)
        for range_ in SPANS:
            await standings.refresh(range_)
        return versions


@dataclass
class Dashboard:
    """A running service, and a recorder beside it."""

    service: TestService
    recording: Recording

    def browser(self) -> httpx.AsyncClient:
        """One that keeps cookies and says where it comes from."""
        return httpx.AsyncClient(
            base_url=self.service.url, headers={"origin": self.service.url}, timeout=20,
            verify=no_certificates(),
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def logged_in(self, key: str = "admin") -> AsyncIterator[httpx.AsyncClient]:
        """A browser with a session."""
        async with self.browser() as browser:
            reply = await self.log_in(browser, self.service.keys[key])
            assert reply.status_code == 200, reply.text
            yield browser

    async def log_in(self, browser: httpx.AsyncClient, key: str) -> httpx.Response:
        return await browser.post("/dashboard/api/session", json={"key": key})


@contextlib.asynccontextmanager
async def dashboard(
    root: Path, database_url: str | None = None, engine: Any = None
) -> AsyncIterator[Dashboard]:
    async with running_service(root, engine or FakeEngine(), database_url=database_url) as service:
        yield Dashboard(service, Recording(service.registry))


def just_now(**changes: object) -> RequestRecord:
    """A request that ended a moment ago."""
    record = request_record(**changes)
    return msgspec.structs.replace(record, arrived=time.time() - 1.0 - record.seconds)


async def get(browser: httpx.AsyncClient, path: str, type_: Any, **query: Any) -> Any:
    reply = await browser.get(f"/dashboard/api/{path}", params=query)
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=type_)


async def fill(at: Dashboard) -> None:
    """Two tenants' requests: five of `acme` for two versions of `tone`, one of `zen`."""
    await at.recording.record(
        [
            just_now(queue={"slot": 0.3, "turn": 0.1}),
            just_now(queue={"slot": 0.1}, finish_reasons=("length",)),
            just_now(
                version=2, ttft=2.0, seconds=4.0, queue={"kv": 1.5}, finish_reasons=("abort",)
            ),
            just_now(adapter="other", queue={}),
            just_now(adapter=None, version=None, queue={}),
            just_now(tenant="zen", adapter="secret", queue={"load": 3.0}),
        ],
        [
            step_record(
                time.time() - 2,
                [StepShare("acme", "tone@1", 1, 30, 1), StepShare("zen", "secret@1", 0, 0, 5)],
            )
        ],
    )
