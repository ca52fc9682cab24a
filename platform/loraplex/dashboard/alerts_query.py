"""Alerts: those that last, and those that ended within a window."""

from typing import Any, cast

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.rollup_models import AlertRow
from loraplex.dashboard.views import Alert, Alerts, Figure
from loraplex.dashboard.windows import begin_of
from loraplex.recorder.widths import Range

MAX_ALERTS = 200


async def alerts(session: AsyncSession, tenant: str | None, range_: Range, now: float) -> Alerts:
    """Those of a window, lasting ones first; a tenant sees its own."""
    lasts = AlertRow.ended.is_(None)
    shown = [or_(lasts, AlertRow.ended >= begin_of(range_, now))]
    if tenant is not None:
        shown.append(AlertRow.tenant == tenant)
    return Alerts(await _read(session, *shown))


async def lasting_alerts(session: AsyncSession) -> list[Alert]:
    """Everybody's that last."""
    return await _read(session, AlertRow.ended.is_(None))


def seen_by(alerts: list[Alert], tenant: str | None) -> Alerts:
    """Those of them that a viewer may see."""
    return Alerts([alert for alert in alerts if tenant in (None, alert.tenant)])


async def _read(session: AsyncSession, *conditions: ColumnElement[bool]) -> list[Alert]:
    rows = await session.scalars(
        select(AlertRow)
        .where(*conditions)
        .order_by(AlertRow.ended.is_not(None), AlertRow.began.desc(), AlertRow.id)
        .limit(MAX_ALERTS)
    )
    return [
        Alert(
            kind=cast(Any, row.kind),
            severity=cast(Any, row.severity),
            tenant=row.tenant,
            adapter=row.adapter,
            version=row.version,
            since=row.began,
            ended=row.ended,
            what=row.what,
            change=row.change,
            figures=[Figure(*figure) for figure in row.figures],
        )
        for row in rows
    ]
