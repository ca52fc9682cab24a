"""Reads the engine's records once a second, and writes what they add up to.

Reading and writing fail apart: while the database is away what was read waits, within bounds, and
while the engine is away nothing is made up. What the engine's rings overwrote in the meantime is
counted as missed.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import structlog

from engine.engine_stats import EngineStats
from engine.errors import EngineUnavailable
from engine.telemetry.records import Cursor, Objective, Telemetry
from loraplex.recorder.ledger import Ledger
from loraplex.recorder.refusals import RefusalCounts
from loraplex.recorder.slot_book import SlotBook
from loraplex.recorder.store import Batch, Progress, QueueNow, RollupStore
from loraplex.recorder.traffic import Subject, subject_of
from loraplex.recorder.widths import FINE, bucket

_log = structlog.get_logger("loraplex.recorder")

MAX_BUCKETS = 20_000
"""Unwritten ones; when the database is away for so long, what is read then is lost."""
SILENT_SECONDS = 15.0
"""An engine is silent during a step. One that is for longer has no queues that anybody knows of."""
LONGEST_GAP_SECONDS = 86_400.0
"""Between two looks at the engine. After a longer one the clock was set, as where a machine starts
without the time, and what was between is no time of which anything is known."""


class Watched(Protocol):
    """What the recorder asks: an `EngineReader`, or a test's."""

    async def telemetry(
        self, cursor: Cursor, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        """What the engine did since a cursor; raises `EngineUnavailable`."""
        ...

    async def stats(self) -> EngineStats:
        """A snapshot; raises `EngineUnavailable`."""
        ...


class Recorder:
    """`start` once, then `read` and `write` again and again."""

    def __init__(
        self,
        engine: Watched,
        store: RollupStore,
        run: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`run` names this run of the service; `clock` gives Unix seconds."""
        self._engine = engine
        self._store = store
        self._run = run
        self._clock = clock
        self._ledger = Ledger()
        self._book = SlotBook()
        self._unwritten: Batch | None = None
        self._progress = Progress(run=run, cursor=Cursor())
        self._refusals = RefusalCounts()
        self._objective = Objective()
        self._queues: list[QueueNow] = []
        self._resident_until = 0.0
        self._totals_due = 0.0
        self._detail: dict[str, Any] = {}

    @property
    def heard_at(self) -> float:
        """When the engine last answered; 0: never."""
        return self._progress.complete_until

    @property
    def objective(self) -> Objective:
        """When a request counts as good, as the engine says."""
        return self._objective

    async def start(self) -> None:
        """Go on where the last recorder of this run stopped; raises `RegistryUnavailable`."""
        known = await self._store.progress()
        if known is None:
            return
        if known.run == self._run:
            self._progress = known
            self._detail = dict(known.detail)
            self._refusals = RefusalCounts(known.detail.get("refused"))
            self._book = SlotBook(await self._store.lasting_stays())
            self._resident_until = known.complete_until
        else:
            await self._store.end_stays(known.complete_until)
            self._progress = Progress(run=self._run, cursor=Cursor(), flush=known.flush)

    async def read(self, *, is_last: bool = False) -> bool:
        """Take in what is new; False, and nothing changed, if the engine does not answer.

        Refusals are looked for every ten seconds, and if it `is_last`.
        """
        if is_last:
            self._totals_due = 0.0
        try:
            stats = await self._engine.stats()
            while (await self._read_some()).has_more:
                pass
        except EngineUnavailable:
            self._totals_due = 0.0
            if self._clock() - self.heard_at > SILENT_SECONDS:
                self._queues = []
            return False
        self._take_stats(stats, self._clock())
        return True

    async def write(self) -> set[Subject]:
        """Write what was read; returns the adapter versions that it told of.

        Raises `RegistryUnavailable`; what was to be written then is written by the next call.
        """
        if self._unwritten is None:
            self._unwritten = self._batch()
        versions = await self._store.write(self._unwritten)
        self._unwritten = None
        return versions

    async def _read_some(self) -> Telemetry:
        wait = self._totals_due - self._clock()
        cursor = self._progress.cursor
        with_totals = not 0 < wait <= FINE  # longer than it ever is: the clock was set back
        answer = await self._engine.telemetry(cursor, with_totals=with_totals)
        if answer.generation != cursor.generation and answer.totals is None:
            # Only its sums tell since when a new engine is there.
            answer = await self._engine.telemetry(cursor, with_totals=True)
        self._take(answer, self._clock())
        return answer

    def _take(self, answer: Telemetry, now: float) -> None:
        progress = self._progress
        is_other = answer.generation != progress.cursor.generation
        if answer.totals is not None:
            self._totals_due = bucket(now, FINE) + FINE
            self._objective = answer.totals.objective
            self._detail["objective"] = msgspec.to_builtins(self._objective)
            for refused in self._refusals.take(answer.generation, answer.totals):
                self._ledger.add_refusals(*refused, at=now)
        began = answer.totals.started if answer.totals is not None else now
        since = progress.complete_until
        if since and _was_set(since, now):
            self._reside(since)
            since = self._resident_until = now
        if is_other:
            if since:
                self._book.end_all(since)
                self._ledger.add_watched(since, min(began, now), is_up=False)
            since = max(since, min(began, now))
            since = self._resident_until = now if _was_set(since, now) else since
        if self._ledger.size > MAX_BUCKETS:
            _log.error("records_dropped", requests=len(answer.requests))
            missed = answer.missed + len(answer.requests) + len(answer.steps)
        else:
            missed = answer.missed
            self._ledger.add_requests(answer.requests, self._objective)
            self._ledger.add_steps(answer.steps)
            self._ledger.add_watched(since, now)
        if missed:
            self._ledger.add_missed(now, missed)
        for event in answer.slot_events:
            self._reside(event.at)
            if self._book.is_arrival(event) and event.owners:
                self._ledger.add_load(event.owners[0], event.at)
            self._book.take(event)
        self._progress = replace(
            progress, cursor=answer.cursor, complete_until=now, missed=progress.missed + missed
        )

    def _reside(self, until: float) -> None:
        """Settle for how long adapters have been resident, before that changes."""
        since, self._resident_until = self._resident_until, max(until, self._resident_until)
        if since and until > since:
            for stay in self._book.residents:
                # What began later than now did so before the clock was set back.
                began = stay.began if stay.began <= until else since
                self._ledger.add_residence(stay.owners, max(since, began), until)

    def _take_stats(self, stats: EngineStats, now: float) -> None:
        self._ledger.add_sample(now, stats)
        self._ledger.add_loads(now, stats.tenants)
        if now - self._resident_until >= FINE:  # a bucket's worth: idle adapters cost few writes
            self._reside(now)
        self._book.drop_reservations(
            {queue.adapter for queue in stats.queues if queue.waiting and queue.adapter}, now
        )
        self._queues = [
            QueueNow(
                subject=subject_of(queue.tenant, queue.label if queue.adapter else None),
                cause=queue.cause,
                waiting=queue.waiting,
                running=queue.running,
                waits_since=now - queue.oldest if queue.waiting else None,
            )
            for queue in stats.queues
            if queue.waiting or queue.running
        ]
        self._detail |= {
            "kv_blocks_total": stats.kv_blocks_total, "slots_total": stats.slots_total,
            "warm": stats.warm, "pinned": stats.pinned,
        }  # fmt: skip

    def _batch(self) -> Batch:
        ledger, self._ledger = self._ledger, Ledger()
        progress = self._progress = replace(
            self._progress,
            flush=self._progress.flush + 1,
            detail={**self._detail, "refused": self._refusals.state},
        )
        return Batch(
            progress=progress,
            traffic=ledger.traffic,
            engine=ledger.engine,
            slow=ledger.slow,
            stays=self._book.take_changed(),
            queues=_one_each(self._queues),
        )


def _was_set(since: float, now: float) -> bool:
    """Whether the clock cannot have come from there to here by itself."""
    return not 0 <= now - since <= LONGEST_GAP_SECONDS


def _one_each(queues: list[QueueNow]) -> list[QueueNow]:
    """The table has one row a subject, whatever the engine says."""
    found: dict[Subject, QueueNow] = {}
    for queue in queues:
        found.setdefault(queue.subject, queue)
    return list(found.values())
