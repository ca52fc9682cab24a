"""Writes what was read from the engine: one transaction a time, with how far was read.

What is written is added to what is there, in the same transaction as the cursor that says how far
was read. So the recorder that follows a killed one counts nothing twice, and leaves nothing out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import delete, func, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.models import Tenant
from adapter_store.registry.rollup_models import (
    EngineRollup,
    RecorderState,
    SlotSpan,
    SlowRequest,
    TrafficRollup,
    TrafficSubject,
    WaitingQueue,
)
from adapter_store.registry.session import Database
from engine.telemetry.records import Cursor, RequestRecord
from loraplex.recorder.engine_bucket import EngineBucket
from loraplex.recorder.ledger import SLOW_PER_HOUR, SlowKey
from loraplex.recorder.rows import (
    ENGINE_COLUMNS,
    TRAFFIC_COLUMNS,
    engine_of,
    engine_values,
    stay_of,
    stay_values,
    traffic_of,
    traffic_values,
)
from loraplex.recorder.slot_book import Stay
from loraplex.recorder.traffic import Subject, Traffic
from loraplex.recorder.widths import KEPT_SECONDS, bucket

_CHUNK = 500
"""Keys that a statement names at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a recorder has come."""

    run: str
    """Of the service: its engines count their generations from 1."""
    cursor: Cursor
    flush: int = 0
    """Grows with each write: of a write whose answer was lost, it tells whether it came through."""
    complete_until: float = 0.0
    missed: int = 0
    """Records that were overwritten before they were read, since the service started."""
    detail: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the engine runs with, and what it had refused by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueNow:
    """A queue that waits or runs at this moment."""

    subject: Subject
    cause: str | None
    waiting: int
    running: int
    waits_since: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one transaction writes."""

    progress: Progress
    traffic: dict[tuple[Subject, int], Traffic] = field(
        default_factory=dict[tuple[Subject, int], Traffic]
    )
    engine: dict[int, EngineBucket] = field(default_factory=dict[int, EngineBucket])
    slow: Sequence[tuple[SlowKey, float, RequestRecord]] = ()
    stays: Sequence[Stay] = ()
    queues: Sequence[QueueNow] = ()


_Key = tuple[Subject, int, int]
"""Subject, width and start of a bucket."""


class RollupStore:
    """Reads and writes the recorder's tables. Methods raise `RegistryUnavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def progress(self) -> Progress | None:
        """How far the last recorder came; None if there was none."""
        row = await self._database.read(lambda s: s.get(RecorderState, 1))
        if row is None:
            return None
        return Progress(
            run=row.run, cursor=msgspec.convert(row.cursor, Cursor), flush=row.flush,
            complete_until=row.complete_until, missed=row.missed, detail=row.detail,
        )  # fmt: skip

    async def lasting_stays(self) -> list[Stay]:
        """Stays in slots that have no end yet."""

        async def work(session: AsyncSession) -> list[Stay]:
            rows = await session.scalars(select(SlotSpan).where(SlotSpan.ended.is_(None)))
            return [stay_of(row) for row in rows]

        return await self._database.read(work)

    async def end_stays(self, at: float) -> None:
        """End those stays: they were of an engine that is gone."""
        await self._database.write(
            lambda s: s.execute(update(SlotSpan).where(SlotSpan.ended.is_(None)).values(ended=at))
        )

    async def write(self, batch: Batch) -> set[Subject]:
        """Write a batch once, however often it is given; returns the versions with new traffic."""
        return await self._database.write(lambda s: _write(s, batch))


async def _write(session: AsyncSession, batch: Batch) -> set[Subject]:
    progress = batch.progress
    row = await session.get(RecorderState, 1, with_for_update=True)
    tenants = await _tenants(session, batch)
    versions = {subject for subject, _ in batch.traffic if subject.tenant in tenants}
    if row is None:
        row = RecorderState(id=1)
        session.add(row)
    elif row.run == progress.run and row.flush >= progress.flush:
        return versions  # it came through before
    row.run, row.flush = progress.run, progress.flush
    row.cursor = msgspec.to_builtins(progress.cursor)
    row.complete_until, row.missed = progress.complete_until, progress.missed
    row.detail = progress.detail
    await _write_traffic(session, batch.traffic, tenants)
    await _write_engine(session, batch.engine)
    await _write_slow(session, [item for item in batch.slow if item[0][0] in tenants])
    await _write_stays(session, batch.stays)
    await _write_queues(session, [q for q in batch.queues if q.subject.tenant in tenants])
    await session.flush()
    return versions


async def _tenants(session: AsyncSession, batch: Batch) -> set[str]:
    """Those of the batch that there are: of one deleted meanwhile nothing must come back."""
    named = {subject.tenant for subject, _ in batch.traffic} | {
        queue.subject.tenant for queue in batch.queues
    }
    rows = await session.scalars(
        select(Tenant.name).where(Tenant.name.in_(named), Tenant.deleted_at.is_(None))
    )
    return set(rows)


def _spread(traffic: dict[tuple[Subject, int], Traffic], tenants: set[str]) -> dict[_Key, Traffic]:
    """What is to be added, for every subject and every width."""
    spread: dict[_Key, Traffic] = {}
    for (subject, start), part in traffic.items():
        family = subject.family if subject.tenant in tenants else (Subject(),)
        for member in family:
            for width in KEPT_SECONDS:
                key = member, width, bucket(start, width)
                spread.setdefault(key, Traffic()).merge(part)
    return spread


async def _write_traffic(
    session: AsyncSession, traffic: dict[tuple[Subject, int], Traffic], tenants: set[str]
) -> None:
    spread = _spread(traffic, tenants)
    ids = await _subject_ids(session, {subject for subject, _, _ in spread})
    added = {(ids[subject], width, start): part for (subject, width, start), part in spread.items()}
    known = await _known_traffic(session, added)
    for key, before in known.items():
        added[key].merge(before)
    rows = [
        {"subject_id": key[0], "width": key[1], "start": key[2], **traffic_values(part)}
        for key, part in added.items()
    ]
    old = [row for row in rows if (row["subject_id"], row["width"], row["start"]) in known]
    new = [row for row in rows if (row["subject_id"], row["width"], row["start"]) not in known]
    if old:
        await session.execute(update(TrafficRollup), old)
    if new:
        await session.execute(insert(TrafficRollup), new)


async def _known_traffic(
    session: AsyncSession, keys: Iterable[tuple[int, int, int]]
) -> dict[tuple[int, int, int], Traffic]:
    by_bucket: dict[tuple[int, int], list[int]] = {}
    for subject_id, width, start in keys:
        by_bucket.setdefault((width, start), []).append(subject_id)
    known: dict[tuple[int, int, int], Traffic] = {}
    for (width, start), ids in by_bucket.items():
        for chunk in _chunks(sorted(ids)):
            rows = await session.execute(
                select(TrafficRollup.subject_id, *TRAFFIC_COLUMNS).where(
                    TrafficRollup.subject_id.in_(chunk),
                    TrafficRollup.width == width,
                    TrafficRollup.start == start,
                )
            )
            known |= {(row.subject_id, width, start): traffic_of(row) for row in rows}
    return known


async def _subject_ids(session: AsyncSession, subjects: set[Subject]) -> dict[Subject, int]:
    key = tuple_(TrafficSubject.tenant, TrafficSubject.adapter, TrafficSubject.version)
    ids: dict[Subject, int] = {}
    for chunk in _chunks(sorted(subjects)):
        rows = await session.execute(
            select(
                TrafficSubject.id, TrafficSubject.tenant, TrafficSubject.adapter,
                TrafficSubject.version,
            ).where(key.in_(chunk))
        )  # fmt: skip
        ids |= {Subject(row.tenant, row.adapter, row.version): row.id for row in rows}
    new = [
        TrafficSubject(tenant=subject.tenant, adapter=subject.adapter, version=subject.version)
        for subject in sorted(subjects - ids.keys())
    ]
    session.add_all(new)
    await session.flush()
    return ids | {Subject(row.tenant, row.adapter, row.version): row.id for row in new}


async def _write_engine(session: AsyncSession, parts: dict[int, EngineBucket]) -> None:
    added: dict[tuple[int, int], EngineBucket] = {}
    for start, part in parts.items():
        for width in KEPT_SECONDS:
            added.setdefault((width, bucket(start, width)), EngineBucket()).merge(part)
    if not added:
        return
    for width in KEPT_SECONDS:
        for starts in _chunks([start for w, start in added if w == width]):
            these = EngineRollup.width == width, EngineRollup.start.in_(starts)
            for row in await session.execute(select(*ENGINE_COLUMNS).where(*these)):
                added[width, row.start].merge(engine_of(row))
            await session.execute(delete(EngineRollup).where(*these))
    await session.execute(
        insert(EngineRollup),
        [{"width": w, "start": s, **engine_values(part)} for (w, s), part in added.items()],
    )


async def _write_slow(
    session: AsyncSession, slow: Sequence[tuple[SlowKey, float, RequestRecord]]
) -> None:
    """Add requests, and keep the slowest of each adapter and hour."""
    if not slow:
        return
    await session.execute(
        insert(SlowRequest),
        [
            {
                "tenant": tenant, "adapter": adapter, "hour": hour, "seconds": seconds,
                "ended": record.arrived + record.seconds,
                "record": msgspec.msgpack.encode(record),
            }
            for (tenant, adapter, hour), seconds, record in slow
        ],
    )  # fmt: skip
    of_adapter = (SlowRequest.tenant, SlowRequest.adapter, SlowRequest.hour)
    place = func.row_number().over(
        partition_by=of_adapter, order_by=(SlowRequest.seconds.desc(), SlowRequest.id)
    )
    for keys in _chunks(sorted({key for key, _, _ in slow})):
        ranked = (
            select(SlowRequest.id, place.label("place"))
            .where(tuple_(*of_adapter).in_(keys))
            .subquery()
        )
        faster = select(ranked.c.id).where(ranked.c.place > SLOW_PER_HOUR)
        await session.execute(delete(SlowRequest).where(SlowRequest.id.in_(faster)))


async def _write_stays(session: AsyncSession, stays: Sequence[Stay]) -> None:
    key = tuple_(SlotSpan.began, SlotSpan.digest, SlotSpan.kind)
    for chunk in _chunks(stays):
        these = (
            SlotSpan.began.in_([stay.began for stay in chunk]),  # what the index is for
            key.in_([(stay.began, stay.digest, stay.kind) for stay in chunk]),
        )
        await session.execute(delete(SlotSpan).where(*these))
    if stays:
        await session.execute(insert(SlotSpan), [stay_values(stay) for stay in stays])


async def _write_queues(session: AsyncSession, queues: Sequence[QueueNow]) -> None:
    await session.execute(delete(WaitingQueue))
    if queues:
        await session.execute(
            insert(WaitingQueue),
            [
                {
                    **queue.subject._asdict(), "cause": queue.cause, "waiting": queue.waiting,
                    "running": queue.running, "waits_since": queue.waits_since,
                }
                for queue in queues
            ],
        )  # fmt: skip


def _chunks(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (items[first : first + _CHUNK] for first in range(0, len(items), _CHUNK))
