"""What admins let a tenant register by reference; the operator's file has the credentials."""

from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import InvalidField
from adapter_store.registry import tenants
from adapter_store.registry.audit import Change
from adapter_store.registry.records import TenantInfo

MAX_GRANTS = 256
"""Of one tenant: they travel with it."""


async def allow(
    session: AsyncSession, change: Change, name: str, source: str, credential: str | None
) -> TenantInfo:
    """Let a tenant use a source, with a credential or without; replaces what was said of it.

    Raises `TenantNotFound`, or `InvalidField` for one more than there may be.
    """
    tenant = await tenants.find(session, name, lock="change")
    granted = {**(tenant.sources or {}), source: credential}
    if len(granted) > MAX_GRANTS:
        raise InvalidField("source", f"a tenant may have {MAX_GRANTS} sources at most")
    tenant.sources = granted
    change.record(session, "tenant.source.allow", name, source, credential=credential)
    await session.flush()
    return tenants.info_of(tenant)


async def withdraw(session: AsyncSession, change: Change, name: str, source: str) -> TenantInfo:
    """Take a source back. Raises `TenantNotFound`, or `InvalidField` for one it has not."""
    tenant = await tenants.find(session, name, lock="change")
    granted = dict(tenant.sources or {})
    if source not in granted:
        raise InvalidField("source", f"the tenant was not allowed {source[:200]!r}")
    del granted[source]
    tenant.sources = granted
    change.record(session, "tenant.source.withdraw", name, source)
    await session.flush()
    return tenants.info_of(tenant)
