"""Drops what is past its time."""

from typing import Any

from sqlalchemy import delete, exists
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.rollup_models import (
    AlertRow,
    EngineRollup,
    SlotSpan,
    SlowRequest,
    TrafficRollup,
    TrafficSubject,
)
from loraplex.recorder.widths import DETAIL_SECONDS, KEPT_SECONDS, QUARTER


async def sweep(session: AsyncSession, now: float) -> None:
    """Delete buckets, requests, stays, alerts and subjects that nothing shows any more."""
    for width, kept in KEPT_SECONDS.items():
        oldest = int(now) - kept
        for table in (TrafficRollup, EngineRollup):
            await session.execute(delete(table).where(table.width == width, table.start < oldest))
    detail = now - DETAIL_SECONDS
    over: tuple[tuple[Any, Any], ...] = (
        (SlowRequest, SlowRequest.hour < int(detail)),
        (SlotSpan, SlotSpan.ended < detail),
        (AlertRow, AlertRow.ended < now - KEPT_SECONDS[QUARTER]),
        (
            TrafficSubject,
            ~exists().where(TrafficRollup.subject_id == TrafficSubject.id),
        ),
    )
    for table, condition in over:
        await session.execute(delete(table).where(condition))
