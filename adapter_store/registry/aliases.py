"""Aliases: movable names of versions. `default` is what an adapter's bare name means."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import AliasConflict
from adapter_store.model_ref import check_alias
from adapter_store.registry import adapters
from adapter_store.registry.audit import Change
from adapter_store.registry.models import AdapterVersion, Alias
from adapter_store.registry.records import AliasChange


async def set_alias(
    session: AsyncSession,
    change: Change,
    tenant: str,
    name: str,
    alias: str,
    version: int,
    expect: int | None,
) -> AliasChange:
    """Point an alias, new or old, to a version.

    With `expect` it moves only if it points to that version now. Raises `InvalidName`,
    `TenantNotFound`, `AdapterNotFound`, `VersionNotFound` or `AliasConflict`.
    """
    check_alias(alias)
    adapter = await adapters.find(session, tenant, name, lock=True)
    target = await adapters.find_version(session, adapter, version)
    previous = await point(session, change, alias, target, expect)
    if previous != version:
        change.record(
            session, "alias.set", tenant, f"{name}:{alias}", version=version, previous=previous
        )
    return AliasChange(alias, version, previous)


async def point(
    session: AsyncSession,
    change: Change,
    alias: str,
    target: AdapterVersion,
    expect: int | None = None,
) -> int | None:
    """Point `alias` to a version of an adapter whose row is locked; return the former version."""
    found = (
        await session.execute(
            select(Alias, AdapterVersion.number)
            .join(AdapterVersion, AdapterVersion.id == Alias.version_id)
            .where(Alias.adapter_id == target.adapter_id, Alias.name == alias)
        )
    ).one_or_none()
    row, current = (found[0], found[1]) if found is not None else (None, None)
    if expect is not None and current != expect:
        now = "does not exist" if current is None else f"points to version {current}"
        raise AliasConflict(f"the alias {alias!r} {now}; expected version {expect}")
    if row is None:
        row = Alias(
            adapter_id=target.adapter_id,
            name=alias,
            version_id=target.id,
            updated_at=change.now,
        )
        session.add(row)
    elif row.version_id != target.id:
        row.version_id = target.id
        row.updated_at = change.now
    await session.flush()
    return current
