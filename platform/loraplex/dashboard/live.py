"""One source of live events for all viewers of a process: the engine is asked once a second, and
only while somebody looks.

Events are made once for each tenant that is looked at, and once for admins, however many look. A
viewer's session is checked twice a second, all of them by one statement.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import structlog

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.session import Database
from engine.client import EngineClient
from engine.engine_info import EngineInfo
from engine.engine_stats import TenantLoad
from engine.errors import EngineUnavailable
from engine.telemetry.records import Cursor, StepRecord
from loraplex.dashboard.alerts_query import lasting_alerts, seen_by
from loraplex.dashboard.live_stream import LiveStream, event
from loraplex.dashboard.live_view import Recent, live_view, load_of
from loraplex.dashboard.progress_query import progress
from loraplex.dashboard.sessions import SessionEnd, Sessions, Viewer
from loraplex.dashboard.slots_query import newest_slots
from loraplex.dashboard.steps_view import MAX_STEPS, steps_view
from loraplex.dashboard.views import Alert, Live

_log = structlog.get_logger("loraplex.dashboard")

TOPICS = frozenset(("slots", "steps"))
SECONDS = 1.0
CHECK_SECONDS = 0.4
"""A session that ends must end its streams within a second."""
ALERT_SECONDS = 3.0
UNCHECKED_SECONDS = 60.0
"""While the registry does not answer, streams go on for so long, as verified keys do."""
FRESH_SECONDS = 3.0


class LiveSource:
    """An async context manager; leaving it ends all streams."""

    def __init__(
        self,
        engine: EngineClient,
        database: Database,
        sessions: Sessions,
        *,
        clock: Callable[[], float] = time.time,
        seconds: float = SECONDS,
    ) -> None:
        self._engine = engine
        self._database = database
        self._sessions = sessions
        self._clock = clock
        self._seconds = seconds
        self._streams: set[LiveStream] = set()
        self._recent = Recent()
        self._cursor = Cursor()
        self._poll: asyncio.Task[list[StepRecord]] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alerts: list[Alert] | None = None
        self._alerts_at = 0.0
        self._missed = 0
        self._is_stopped = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.stop()
        tasks: list[asyncio.Task[Any]] = [*self._tasks.values()]
        if self._poll is not None:
            tasks.append(self._poll)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_streams(self) -> int:
        """Viewers at this moment."""
        return len(self._streams)

    def open(self, viewer: Viewer, topics: frozenset[str]) -> LiveStream:
        """Begin a viewer's events; `close` them."""
        stream = LiveStream(viewer, topics)
        if self._is_stopped:
            stream.end("stopping")
            return stream
        self._streams.add(stream)
        if self._alerts is not None:
            stream.put(event("alerts", seen_by(self._alerts, viewer.tenant)))
        for work in (self._run, self._check_sessions):  # each ends by itself when nobody looks
            task = self._tasks.get(work.__name__)
            if task is None or task.done():
                self._tasks[work.__name__] = asyncio.create_task(work(), name="live")
        return stream

    def close(self, stream: LiveStream) -> None:
        """The viewer is gone; synchronous, and harmless a second time."""
        self._streams.discard(stream)

    def stop(self) -> None:
        """End all streams, and those that are opened later: the process is about to end."""
        self._is_stopped = True
        for stream in self._streams:
            stream.end("stopping")

    async def live(self, tenant: str | None) -> Live | None:
        """The newest event `live`; None if the engine never answered."""
        await self._freshen()
        return self._live(tenant) if self._recent.at else None

    async def load(self, tenant: str) -> TenantLoad | None:
        """What runs and waits of a tenant; None while the engine is away."""
        await self._freshen()
        stats = self._recent.stats
        return load_of(stats, tenant) if stats is not None and self._engine.is_ready else None

    async def steps(self) -> Sequence[StepRecord]:
        """The newest steps."""
        await self._freshen()
        return list(self._recent.steps)

    def now(self) -> float:
        """The time that windows end at, Unix seconds."""
        return self._clock()

    @property
    def info(self) -> EngineInfo | None:
        """What the engine runs with; None before its first welcome."""
        try:
            return self._engine.info
        except EngineUnavailable:
            return None

    async def _freshen(self) -> None:
        """Ask the engine, unless it was asked just now; wait a moment for its answer."""
        if abs(self._clock() - self._recent.at) > FRESH_SECONDS:  # a clock may be set back
            await asyncio.wait([self._ask()], timeout=self._seconds)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._streams:
            began = loop.time()
            poll = self._ask()
            # An engine may be within a long step: events come all the same, with what is known.
            await asyncio.wait([poll], timeout=self._seconds)
            steps = poll.result() if poll.done() else []
            try:
                await self._publish(steps)
            except RegistryUnavailable:
                _log.warning("live_registry_away")
            except Exception:  # the next second may be better
                _log.exception("live_failed")
            await asyncio.sleep(max(0.0, self._seconds - (loop.time() - began)))

    def _ask(self) -> asyncio.Task[list[StepRecord]]:
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._read_engine(), name="live-poll")
        return self._poll

    async def _read_engine(self) -> list[StepRecord]:
        """Take in what is new; returns the new steps."""
        new: list[StepRecord] = []
        try:
            stats = await self._engine.stats()
            while True:
                answer = await self._engine.telemetry(
                    self._cursor, with_totals=self._cursor.generation == 0
                )
                self._cursor = answer.cursor
                self._recent.take(answer, stats, self._clock())
                new += answer.steps
                if not answer.has_more:
                    return new
        except EngineUnavailable:
            return new

    async def _publish(self, steps: Sequence[StepRecord]) -> None:
        by_tenant: dict[str | None, list[LiveStream]] = {}
        for stream in self._streams:
            by_tenant.setdefault(stream.viewer.tenant, []).append(stream)
        for tenant, streams in by_tenant.items():
            _put(streams, event("live", self._live(tenant)))
            if steps and (watching := [s for s in streams if "steps" in s.topics]):
                _put(watching, event("steps", steps_view(steps[-MAX_STEPS:], tenant)))
        await self._publish_alerts(by_tenant)
        for tenant, streams in by_tenant.items():
            if watching := [stream for stream in streams if "slots" in stream.topics]:
                now = self._clock()
                slots = await self._database.read(
                    lambda s, tenant=tenant, now=now: newest_slots(s, tenant, now)
                )
                _put(watching, event("slots", slots))

    async def _publish_alerts(self, by_tenant: dict[str | None, list[LiveStream]]) -> None:
        now = self._clock()
        if abs(now - self._alerts_at) < ALERT_SECONDS:
            return
        self._alerts_at = now
        alerts = await self._database.read(lasting_alerts)
        self._missed = (await self._database.read(progress)).missed
        before, self._alerts = self._alerts, alerts
        for tenant, streams in by_tenant.items():
            seen = seen_by(alerts, tenant)
            if before is None or seen_by(before, tenant) != seen:
                _put(streams, event("alerts", seen))

    def _live(self, tenant: str | None) -> Live:
        return live_view(
            self._recent, self.info, tenant, self._clock(),
            is_up=self._engine.is_ready, missed=self._missed,
        )  # fmt: skip

    async def _check_sessions(self) -> None:
        checked_at = self._clock()
        while self._streams:
            try:
                ended = await self._sessions.ended({s.viewer.token_hash for s in self._streams})
                checked_at = self._clock()
            except Exception as error:  # whatever it is: who is not checked is let go in the end
                _log.warning("sessions_not_checked", error=type(error).__name__)
                ended: dict[str, SessionEnd] = {}
                if abs(self._clock() - checked_at) > UNCHECKED_SECONDS:
                    ended = {s.viewer.token_hash: "stopping" for s in self._streams}
            for stream in self._streams:
                if (reason := ended.get(stream.viewer.token_hash)) is not None:
                    stream.end(reason)
            await asyncio.sleep(CHECK_SECONDS)


def _put(streams: Sequence[LiveStream], data: bytes) -> None:
    for stream in streams:
        stream.put(data)
