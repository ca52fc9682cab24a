"""The audit log: every change of tenants, keys, adapters and aliases leaves a row."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.model_ref import is_name
from adapter_store.registry.models import Audit
from adapter_store.registry.records import AuditEntry


@dataclass(frozen=True, slots=True)
class Change:
    """Who changes the registry, and when."""

    actor: str
    now: datetime

    def record(
        self, session: AsyncSession, action: str, tenant: str | None, subject: str, **detail: Any
    ) -> None:
        """Add the row to the transaction of the change itself: both are stored, or neither."""
        session.add(
            Audit(
                actor=self.actor,
                action=action,
                tenant=tenant,
                subject=subject,
                detail=detail,
                created_at=self.now,
            )
        )


async def newest(
    session: AsyncSession, limit: int, *, before: int | None = None, tenant: str | None = None
) -> list[AuditEntry]:
    """The newest `limit` entries, newest first: of a tenant, older than an entry, or all."""
    if tenant is not None and not is_name(tenant):
        return []
    query = select(Audit).order_by(Audit.id.desc()).limit(limit)
    if before is not None:
        query = query.where(Audit.id < before)
    if tenant is not None:
        query = query.where(Audit.tenant == tenant)
    return [
        AuditEntry(
            entry_id=row.id,
            created_at=row.created_at,
            actor=row.actor,
            action=row.action,
            tenant=row.tenant,
            subject=row.subject,
            detail=row.detail,
        )
        for row in await session.scalars(query)
    ]
