"""Reads buckets: of a subject, and of the engine. Each is one statement over an index."""

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.rollup_models import EngineRollup, TrafficRollup, TrafficSubject
from loraplex.dashboard.windows import Axis, begin_of
from loraplex.recorder.engine_bucket import EngineBucket
from loraplex.recorder.rows import ENGINE_COLUMNS, TRAFFIC_COLUMNS, engine_of, traffic_of
from loraplex.recorder.traffic import Subject, Traffic
from loraplex.recorder.widths import SPANS, Range


async def engine_buckets(
    session: AsyncSession, range_: Range, now: float
) -> dict[int, EngineBucket]:
    """The engine's buckets of a window, by their start."""
    rows = await session.execute(
        select(*ENGINE_COLUMNS).where(
            EngineRollup.width == SPANS[range_].width,
            EngineRollup.start >= begin_of(range_, now),
            EngineRollup.start <= now,
        )
    )
    return {row.start: engine_of(row) for row in rows}


def axis_of(range_: Range, now: float, engine: Mapping[int, EngineBucket]) -> Axis:
    """The window's buckets, with what is known of them."""
    return Axis(range_, now, {start: part.covered for start, part in engine.items()})


async def subject_buckets(
    session: AsyncSession, subject: Subject, range_: Range, now: float
) -> dict[int, Traffic]:
    """A subject's buckets of a window, by their start."""
    rows = await session.execute(
        select(TrafficRollup.start, *TRAFFIC_COLUMNS)
        .join(TrafficSubject, TrafficSubject.id == TrafficRollup.subject_id)
        .where(
            TrafficSubject.tenant == subject.tenant,
            TrafficSubject.adapter == subject.adapter,
            TrafficSubject.version == subject.version,
            TrafficRollup.width == SPANS[range_].width,
            TrafficRollup.start >= begin_of(range_, now),
            TrafficRollup.start <= now,
        )
    )
    return {row.start: traffic_of(row) for row in rows}


async def version_buckets(
    session: AsyncSession, tenant: str, adapter: str, range_: Range, now: float
) -> dict[int, dict[int, Traffic]]:
    """An adapter's buckets of a window, by version and start."""
    rows = await session.execute(
        select(TrafficSubject.version, TrafficRollup.start, *TRAFFIC_COLUMNS)
        .join(TrafficRollup, TrafficRollup.subject_id == TrafficSubject.id)
        .where(
            TrafficSubject.tenant == tenant,
            TrafficSubject.adapter == adapter,
            TrafficRollup.width == SPANS[range_].width,
            TrafficRollup.start >= begin_of(range_, now),
            TrafficRollup.start <= now,
        )
    )
    found: dict[int, dict[int, Traffic]] = {}
    for row in rows:
        found.setdefault(row.version, {})[row.start] = traffic_of(row)
    return found
