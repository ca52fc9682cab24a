"""Usage rows: one a request, kept whatever becomes of the adapter."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import TenantNotFound
from adapter_store.registry import tenants
from adapter_store.registry.models import Tenant, Usage
from adapter_store.registry.records import UsageRecord

_CLOCKS_DIFFER = timedelta(minutes=1)
"""At most, between the hosts that share a registry."""


async def record(session: AsyncSession, records: Sequence[UsageRecord], now: datetime) -> None:
    """Add rows; a request id that has one is left alone, so that a write may be repeated.

    A row that is older than the tenant of its name is one of a former tenant, which was deleted
    with its usage. Raises `TenantNotFound`.
    """
    names = {record.tenant for record in records}
    rows = await session.execute(
        select(Tenant.name, Tenant.id, Tenant.created_at).where(Tenant.name.in_(names))
    )
    owners = {row.name: row for row in rows}
    for record in records:
        owner = owners.get(record.tenant)
        if owner is None or (record.created_at or now) < owner.created_at - _CLOCKS_DIFFER:
            raise TenantNotFound(f"there is no tenant {record.tenant[:64]!r}")
    known = set(
        await session.scalars(
            select(Usage.request_id).where(Usage.request_id.in_([r.request_id for r in records]))
        )
    )
    for record in records:
        if record.request_id in known:
            continue
        known.add(record.request_id)
        session.add(
            Usage(
                request_id=record.request_id,
                tenant_id=owners[record.tenant].id,
                adapter=record.adapter,
                version=record.version,
                prompt_tokens=record.prompt_tokens,
                cached_tokens=record.cached_tokens,
                output_tokens=record.output_tokens,
                finish_reason=record.finish_reason,
                queue_seconds=record.queue_seconds,
                load_seconds=record.load_seconds,
                prefill_seconds=record.prefill_seconds,
                decode_seconds=record.decode_seconds,
                engine_seconds=record.engine_seconds,
                created_at=record.created_at or now,
            )
        )


async def newest(session: AsyncSession, tenant: str, limit: int) -> list[UsageRecord]:
    """A tenant's newest `limit` rows, newest first; raises `TenantNotFound`."""
    owner = await tenants.find(session, tenant)
    rows = await session.scalars(
        select(Usage)
        .where(Usage.tenant_id == owner.id)
        .order_by(Usage.created_at.desc(), Usage.id.desc())
        .limit(limit)
    )
    return [
        UsageRecord(
            request_id=row.request_id,
            tenant=tenant,
            adapter=row.adapter,
            version=row.version,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            output_tokens=row.output_tokens,
            finish_reason=row.finish_reason,
            queue_seconds=row.queue_seconds,
            load_seconds=row.load_seconds,
            prefill_seconds=row.prefill_seconds,
            decode_seconds=row.decode_seconds,
            engine_seconds=row.engine_seconds,
            created_at=row.created_at,
        )
        for row in rows
    ]
