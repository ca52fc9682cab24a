"""Tenants."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import InvalidField, NameTaken, TenantNotFound
from adapter_store.model_ref import check_tenant_name, is_name
from adapter_store.registry.audit import Change
from adapter_store.registry.models import Tenant
from adapter_store.registry.records import MAX_WEIGHT, MIN_WEIGHT, TenantInfo


async def create(session: AsyncSession, change: Change, name: str, weight: float) -> TenantInfo:
    """Raises `InvalidName`, `InvalidField` or `NameTaken`."""
    check_tenant_name(name)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidField("weight", f"weight must be {MIN_WEIGHT} to {MAX_WEIGHT}, not {weight}")
    if await session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
        raise NameTaken(f"the tenant {name!r} exists already")
    tenant = Tenant(name=name, weight=float(weight), created_at=change.now)
    session.add(tenant)
    change.record(session, "tenant.create", name, name, weight=tenant.weight)
    await session.flush()
    return info_of(tenant)


async def list_all(session: AsyncSession) -> list[TenantInfo]:
    """All tenants, by name."""
    return [info_of(row) for row in await session.scalars(select(Tenant).order_by(Tenant.name))]


async def get(session: AsyncSession, name: str) -> TenantInfo:
    """Raises `TenantNotFound`."""
    return info_of(await find(session, name))


async def find(session: AsyncSession, name: str) -> Tenant:
    """The row; raises `TenantNotFound`."""
    tenant = None
    if is_name(name):
        tenant = await session.scalar(select(Tenant).where(Tenant.name == name))
    if tenant is None:
        raise TenantNotFound(f"there is no tenant {name[:64]!r}")
    return tenant


def info_of(tenant: Tenant) -> TenantInfo:
    """The row as a record."""
    return TenantInfo(name=tenant.name, weight=tenant.weight, created_at=tenant.created_at)
