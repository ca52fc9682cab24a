"""Quotas: what a tenant may use. The registry keeps them all, and itself holds to those of storage.

Rates are counted by the service, concurrency and queues by the engine.
"""

from dataclasses import asdict

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import InvalidField, QuotaExceeded
from adapter_store.peft_format import InspectedAdapter
from adapter_store.registry import tenants
from adapter_store.registry.audit import Change
from adapter_store.registry.models import Adapter, AdapterVersion, Tenant
from adapter_store.registry.records import MAX_WEIGHT, MIN_WEIGHT, Quota, TenantInfo


async def set_quota(
    session: AsyncSession, change: Change, name: str, quota: Quota, weight: float | None
) -> TenantInfo:
    """Replace a tenant's quota whole, and its weight if one is given.

    What the tenant has beyond it stays. Raises `TenantNotFound` or `InvalidField`.
    """
    limits = {field: limit for field, limit in asdict(quota).items() if limit is not None}
    for field, limit in limits.items():
        if limit < 1:
            raise InvalidField(field, f"{field} must be at least 1, not {limit}")
    if weight is not None and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidField("weight", f"weight must be {MIN_WEIGHT} to {MAX_WEIGHT}, not {weight}")
    tenant = await tenants.find(session, name, lock="change")
    tenant.quota = limits
    if weight is not None:
        tenant.weight = float(weight)
    change.record(session, "tenant.quota", name, name, weight=tenant.weight, **limits)
    await session.flush()
    return tenants.info_of(tenant)


async def check_new_version(
    session: AsyncSession, owner: Tenant, inspected: InspectedAdapter
) -> None:
    """Raise `QuotaExceeded` unless the tenant may keep one more version of an adapter.

    Called in the transaction that adds it, when its adapter's row is there. Uploads of a tenant
    with such a quota come one after the other, or two could take the last place.
    """
    quota = tenants.info_of(owner).quota
    if quota.max_rank is not None and inspected.report.rank > quota.max_rank:
        raise QuotaExceeded(
            "rank_quota_exceeded",
            f"the adapter's rank is {inspected.report.rank}; the tenant may have {quota.max_rank}",
        )
    if quota.max_adapters is None and quota.max_adapter_bytes is None:
        return
    # Compatible with the locks that keep a tenant, so that two of them cannot wait for each other.
    await session.execute(
        select(Tenant.id).where(Tenant.id == owner.id).with_for_update(key_share=True)
    )
    if quota.max_adapters is not None:
        await _check_adapters(session, owner.id, quota.max_adapters)
    if quota.max_adapter_bytes is not None:
        await _check_bytes(session, owner.id, inspected.report.bytes, quota.max_adapter_bytes)


async def _check_adapters(session: AsyncSession, tenant_id: int, limit: int) -> None:
    count = await session.scalar(
        select(func.count())
        .select_from(Adapter)
        .where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))
    )
    if (count or 0) > limit:
        raise QuotaExceeded(
            "adapter_quota_exceeded", f"the tenant may have {limit} adapters; delete one first"
        )


async def _check_bytes(session: AsyncSession, tenant_id: int, added: int, limit: int) -> None:
    kept = await session.scalar(
        select(func.sum(AdapterVersion.bytes))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant_id)
    )
    if int(kept or 0) + added > limit:
        raise QuotaExceeded(
            "adapter_bytes_quota_exceeded",
            f"the tenant's adapters have {int(kept or 0)} bytes, and {added} more are over its "
            f"quota of {limit}; delete versions first",
        )
