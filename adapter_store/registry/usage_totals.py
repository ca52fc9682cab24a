"""Usage, summed: by tenant, by adapter version, by hour or day (UTC), over a range of time."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.model_ref import BASE_NAME, is_name
from adapter_store.registry.models import Tenant, Usage
from adapter_store.registry.records import UsageGroup, UsageTotals

# Literals, not parameters: PostgreSQL must see that what is selected is what is grouped by.
_PERIODS = {
    "sqlite": {"hour": "'%Y-%m-%dT%H:00:00Z'", "day": "'%Y-%m-%dT00:00:00Z'"},
    "postgresql": {
        "hour": """'YYYY-MM-DD"T"HH24":00:00Z"'""",
        "day": """'YYYY-MM-DD"T00:00:00Z"'""",
    },
}


async def sum_up(
    session: AsyncSession,
    since: datetime,
    until: datetime,
    group_by: Collection[UsageGroup],
    *,
    tenant: str | None = None,
    limit: int,
) -> list[UsageTotals]:
    """Totals of what was recorded from `since` until before `until`, sorted; at most `limit`.

    Of one tenant, or of all, deleted ones included.
    """
    if tenant is not None and not is_name(tenant):
        return []
    dialect = session.get_bind().dialect.name
    groups: dict[str, ColumnElement[Any]] = {}
    for unit in ("day", "hour"):  # the finer one, if both are asked for
        if unit in group_by:
            groups["period"] = _period(dialect, unit)
    if "tenant" in group_by:
        groups["tenant"] = Tenant.name.expression
    if "adapter" in group_by:
        groups["adapter"] = Usage.adapter.expression
        groups["version"] = Usage.version.expression
    query = (
        select(
            *(column.label(name) for name, column in groups.items()),
            func.count().label("requests"),
            func.coalesce(func.sum(Usage.prompt_tokens), 0).label("prompt_tokens"),
            func.coalesce(func.sum(Usage.cached_tokens), 0).label("cached_tokens"),
            func.coalesce(func.sum(Usage.output_tokens), 0).label("output_tokens"),
            func.coalesce(func.sum(Usage.engine_seconds), 0.0).label("engine_seconds"),
        )
        .join(Tenant, Tenant.id == Usage.tenant_id)
        .where(Usage.created_at >= since, Usage.created_at < until)
        .group_by(*groups.values())
        .limit(limit)
    )
    if tenant is not None:
        query = query.where(Tenant.name == tenant)
    rows = (await session.execute(query)).mappings()
    totals = [_totals(row, has_adapter="adapter" in groups) for row in rows]
    # Here, for databases order names and what is NULL differently.
    return sorted(
        totals, key=lambda t: (t.period or "", t.tenant or "", t.adapter or "", t.version or 0)
    )


def _period(dialect: str, unit: str) -> ColumnElement[str]:
    pattern = literal_column(_PERIODS[dialect][unit])
    if dialect == "sqlite":
        return func.strftime(pattern, Usage.created_at)
    return func.to_char(func.timezone(literal_column("'UTC'"), Usage.created_at), pattern)


def _totals(row: Any, *, has_adapter: bool) -> UsageTotals:
    adapter = (row["adapter"] or BASE_NAME) if has_adapter else None
    return UsageTotals(
        period=row.get("period"),
        tenant=row.get("tenant"),
        adapter=adapter,
        version=row.get("version"),
        requests=row["requests"],
        prompt_tokens=int(row["prompt_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
        output_tokens=int(row["output_tokens"]),
        engine_seconds=float(row["engine_seconds"]),
    )
