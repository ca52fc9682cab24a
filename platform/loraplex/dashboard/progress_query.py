"""How far the recorder has written, and what it knows of the engine."""

from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.rollup_models import RecorderState
from engine.telemetry.records import Objective


class RecorderProgress(msgspec.Struct, frozen=True):
    """As the last write left it; all zero before the first one."""

    complete_until: float = 0.0
    missed: int = 0
    objective: Objective = Objective()
    slots_total: int = 0
    warm: tuple[str, ...] = ()
    """Digests that stay in host memory."""


async def progress(session: AsyncSession) -> RecorderProgress:
    """Read it."""
    row = await session.scalar(select(RecorderState).where(RecorderState.id == 1))
    if row is None:
        return RecorderProgress()
    detail: dict[str, Any] = row.detail
    return RecorderProgress(
        complete_until=row.complete_until,
        missed=row.missed,
        objective=msgspec.convert(detail.get("objective", []), Objective),
        slots_total=detail.get("slots_total", 0),
        warm=tuple(detail.get("warm", ())),
    )
