"""Tenants: created, listed, suspended, deleted with all they have."""

from datetime import datetime
from typing import Literal

import msgspec
from sqlalchemy import delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from adapter_store.errors import InvalidField, NameTaken, TenantNotFound
from adapter_store.model_ref import check_page, check_tenant_name, is_name
from adapter_store.registry import rollups
from adapter_store.registry.audit import Change
from adapter_store.registry.models import (
    Adapter,
    AdapterVersion,
    Alias,
    ApiKey,
    Registration,
    StoredReply,
    Tenant,
    Usage,
)
from adapter_store.registry.records import MAX_WEIGHT, MIN_WEIGHT, Quota, TenantInfo


async def create(session: AsyncSession, change: Change, name: str, weight: float) -> TenantInfo:
    """Raises `InvalidName`, `InvalidField` or `NameTaken`."""
    check_tenant_name(name)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidField("weight", f"weight must be {MIN_WEIGHT} to {MAX_WEIGHT}, not {weight}")
    former = await session.scalar(select(Tenant).where(Tenant.name == name))
    if former is not None:
        if former.deleted_at is None:
            raise NameTaken(f"the tenant {name!r} exists already")
        raise NameTaken(
            f"a deleted tenant was called {name!r}, and its usage is kept: take another name, or "
            "delete that tenant once more with its usage (`?usage=delete`)"
        )
    tenant = Tenant(name=name, weight=float(weight), created_at=change.now)
    session.add(tenant)
    change.record(session, "tenant.create", name, name, weight=tenant.weight)
    await session.flush()
    return info_of(tenant)


async def list_all(
    session: AsyncSession, limit: int | None = None, after: str = ""
) -> list[TenantInfo]:
    """Tenants by name: all, or the first `limit` of those after a name.

    Raises `InvalidField` (after).
    """
    check_page(after)
    rows = await session.scalars(
        select(Tenant)
        .where(Tenant.deleted_at.is_(None), Tenant.name > after)
        .order_by(Tenant.name)
        .limit(limit)
    )
    return [info_of(row) for row in rows]


async def get(session: AsyncSession, name: str) -> TenantInfo:
    """Raises `TenantNotFound`."""
    return info_of(await find(session, name))


async def find(
    session: AsyncSession,
    name: str,
    *,
    lock: Literal["keep", "change"] | None = None,
    deleted_too: bool = False,
    created_at: datetime | None = None,
) -> Tenant:
    """The row, locked for the transaction if asked; raises `TenantNotFound`.

    `keep` holds off a deletion and nothing else, `change` holds off everything. With `created_at`
    only the tenant that was created then: its name may be another's by now.
    """
    tenant = None
    if is_name(name):
        query = select(Tenant).where(Tenant.name == name)
        if lock is not None:
            is_kept = lock == "keep"
            query = query.with_for_update(read=is_kept, key_share=is_kept)
        tenant = await session.scalar(query)
    if tenant is not None and created_at not in (None, tenant.created_at):
        tenant = None
    if tenant is None or (tenant.deleted_at is not None and not deleted_too):
        raise TenantNotFound(f"there is no tenant {name[:64]!r}")
    return tenant


async def suspend(
    session: AsyncSession, change: Change, name: str, *, suspended: bool
) -> TenantInfo:
    """Suspend a tenant, or let it go on; a second time changes nothing. Raises `TenantNotFound`."""
    tenant = await find(session, name, lock="change")
    if suspended != (tenant.suspended_at is not None):
        tenant.suspended_at = change.now if suspended else None
        change.record(session, "tenant.suspend" if suspended else "tenant.resume", name, name)
        await session.flush()
    return info_of(tenant)


async def remove(
    session: AsyncSession, change: Change, name: str, *, with_usage: bool
) -> list[str]:
    """Delete a tenant with its keys, adapters and stored replies, and with its usage if asked.

    While its usage is kept its name is too; deleting it again with the usage frees the name, and
    drops what the dashboard has of it. The audit stays. Returns the digests that no version of
    another tenant names. Raises `TenantNotFound`.
    """
    tenant = await find(session, name, lock="change", deleted_too=with_usage)
    mine = select(Adapter.id).where(Adapter.tenant_id == tenant.id)
    digests = await _digests_of_no_other(session, tenant.id)
    for table, condition in (
        (Alias, Alias.adapter_id.in_(mine)),
        (AdapterVersion, AdapterVersion.adapter_id.in_(mine)),
        (Adapter, Adapter.tenant_id == tenant.id),
        (ApiKey, ApiKey.tenant_id == tenant.id),
        (StoredReply, StoredReply.tenant_id == tenant.id),
        (Registration, Registration.tenant_id == tenant.id),
    ):
        await session.execute(delete(table).where(condition))
    change.record(session, "tenant.delete", name, name, with_usage=with_usage)
    if with_usage:
        await session.execute(delete(Usage).where(Usage.tenant_id == tenant.id))
        await rollups.forget_tenant(session, name)
        await session.delete(tenant)
    else:
        tenant.deleted_at = change.now
    await session.flush()
    return digests


async def _digests_of_no_other(session: AsyncSession, tenant_id: int) -> list[str]:
    version, owner = aliased(AdapterVersion), aliased(Adapter)
    others = (
        exists()
        .where(version.digest == AdapterVersion.digest)
        .where(owner.id == version.adapter_id, owner.tenant_id != tenant_id)
    )
    found = await session.scalars(
        select(AdapterVersion.digest)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant_id, ~others)
        .distinct()
    )
    return sorted(found)


def info_of(tenant: Tenant) -> TenantInfo:
    """The row as a record."""
    return TenantInfo(
        name=tenant.name,
        weight=tenant.weight,
        created_at=tenant.created_at,
        suspended_at=tenant.suspended_at,
        quota=msgspec.convert(tenant.quota or {}, Quota),
        sources=tenant.sources or {},
    )
