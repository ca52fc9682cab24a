"""What becomes of a tenant's roll-ups when nothing of it is to be left."""

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.rollup_models import (
    AdapterStanding,
    AlertRow,
    SlotSpan,
    SlowRequest,
    TrafficSubject,
    WaitingQueue,
)


async def forget_tenant(session: AsyncSession, tenant: str) -> None:
    """Drop all that is told of a tenant, before somebody else may have its name."""
    for table in (TrafficSubject, AdapterStanding, SlowRequest, WaitingQueue, AlertRow):
        await session.execute(delete(table).where(table.tenant == tenant))
    spans = await session.execute(select(SlotSpan.id, SlotSpan.owners))
    owned = [row.id for row in spans if any(owner == tenant for owner, _ in row.owners)]
    for first in range(0, len(owned), 500):
        await session.execute(delete(SlotSpan).where(SlotSpan.id.in_(owned[first : first + 500])))
