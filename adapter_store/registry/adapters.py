"""Adapters: a tenant's names. `versions.py` has their versions, `aliases.py` their aliases."""

from collections.abc import Iterable
from typing import Any, cast

from sqlalchemy import ColumnElement, delete, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from adapter_store.errors import AdapterNotFound, VersionNotFound
from adapter_store.model_ref import MAX_TOLD, MAX_VERSION, check_page, is_name, versions_told
from adapter_store.registry import tenants
from adapter_store.registry.audit import Change
from adapter_store.registry.models import Adapter, AdapterVersion, Alias
from adapter_store.registry.records import AdapterInfo, Canary, Residency


async def find(session: AsyncSession, tenant: str, name: str, *, lock: bool = False) -> Adapter:
    """The row of a live adapter, locked for the transaction if asked.

    Raises `TenantNotFound` or `AdapterNotFound`.
    """
    owner = await tenants.find(session, tenant)
    adapter = await find_row(session, owner.id, name, lock=lock)
    if adapter is None or adapter.deleted_at is not None:
        raise AdapterNotFound(f"there is no adapter {name[:64]!r}")
    return adapter


async def find_row(
    session: AsyncSession, tenant_id: int, name: str, *, lock: bool
) -> Adapter | None:
    """The row of a name, also where only its version counter is left."""
    if not is_name(name):
        return None
    query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name)
    return await session.scalar(query.with_for_update() if lock else query)


async def find_version(session: AsyncSession, adapter: Adapter, number: int) -> AdapterVersion:
    """The row of a version; raises `VersionNotFound`, which says what versions there are."""
    version = None
    if 0 < number <= MAX_VERSION:
        version = await session.scalar(
            select(AdapterVersion).where(
                AdapterVersion.adapter_id == adapter.id, AdapterVersion.number == number
            )
        )
    if version is None:
        newest = await session.scalars(
            select(AdapterVersion.number)
            .where(AdapterVersion.adapter_id == adapter.id)
            .order_by(AdapterVersion.number.desc())
            .limit(MAX_TOLD + 1)
        )
        told = versions_told(newest.all())
        raise VersionNotFound(f"the adapter {adapter.name!r} has no version {number}; {told}")
    return version


async def list_of(
    session: AsyncSession, tenant: str, limit: int | None = None, after: str = ""
) -> list[AdapterInfo]:
    """A tenant's live adapters by name: all, or the first `limit` of those after a name.

    Raises `TenantNotFound` or `InvalidField` (after).
    """
    check_page(after)
    owner = await tenants.find(session, tenant)
    of = (Adapter.tenant_id == owner.id) & (Adapter.name > after)
    query = select(Adapter).where(of, Adapter.deleted_at.is_(None)).order_by(Adapter.name)
    rows = list(await session.scalars(query.limit(limit)))
    if rows and limit is not None:
        of &= Adapter.name <= rows[-1].name
    return await _infos(session, rows, of)


async def get(session: AsyncSession, tenant: str, name: str) -> AdapterInfo:
    """Raises `TenantNotFound` or `AdapterNotFound`."""
    adapter = await find(session, tenant, name)
    return (await _infos(session, [adapter], Adapter.id == adapter.id))[0]


async def remove(session: AsyncSession, change: Change, tenant: str, name: str) -> list[str]:
    """Delete an adapter with its versions and aliases; only its version counter stays.

    Returns the digests that no version of any tenant names any more. Raises `TenantNotFound` or
    `AdapterNotFound`.
    """
    adapter = await find(session, tenant, name, lock=True)
    mine = AdapterVersion.adapter_id == adapter.id
    other = aliased(AdapterVersion)
    others = exists().where(other.digest == AdapterVersion.digest, other.adapter_id != adapter.id)
    unused = await session.scalars(select(AdapterVersion.digest).where(mine, ~others).distinct())
    digests = sorted(unused)
    await session.execute(delete(Alias).where(Alias.adapter_id == adapter.id))
    await session.execute(delete(AdapterVersion).where(mine))
    adapter.deleted_at = change.now
    adapter.residency = "auto"
    change.record(session, "adapter.delete", tenant, name, last_version=adapter.last_version)
    return digests


async def _infos(
    session: AsyncSession, rows: list[Adapter], of: ColumnElement[bool]
) -> list[AdapterInfo]:
    """`of` holds for `rows`, and for no other live adapters."""
    versions = {
        key: (count, newest, updated_at)
        for key, count, newest, updated_at in await session.execute(
            select(
                Adapter.id,
                func.count(),
                func.max(AdapterVersion.number),
                func.max(AdapterVersion.created_at),
            )
            .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
            .where(of)
            .group_by(Adapter.id)
        )
    }
    aliases: dict[int, dict[str, int]] = {row.id: {} for row in rows}
    canaries: dict[int, dict[str, Canary]] = {row.id: {} for row in rows}
    other = aliased(AdapterVersion)
    pointing = (
        select(
            Alias.adapter_id, Alias.name, AdapterVersion.number, other.number, Alias.canary_share
        )
        .join(AdapterVersion, AdapterVersion.id == Alias.version_id)
        .outerjoin(other, other.id == Alias.canary_version_id)
        .join(Adapter, Adapter.id == Alias.adapter_id)
        .where(of)
        .order_by(Alias.name)
    )
    for row in await session.execute(pointing):
        key, alias, number, canary, share = cast("tuple[int, str, int, int | None, Any]", row)
        aliases[key][alias] = number
        if canary is not None:  # an outer join
            canaries[key][alias] = Canary(canary, share)
    infos: list[AdapterInfo] = []
    for row in rows:
        count, newest, updated_at = versions[row.id]
        infos.append(
            AdapterInfo(
                name=row.name,
                latest_version=newest,
                num_versions=count,
                aliases=aliases[row.id],
                canaries=canaries[row.id],
                created_at=row.created_at,
                updated_at=updated_at,
                residency=cast(Residency, row.residency),
            )
        )
    return infos


async def names_of(session: AsyncSession, tenant_id: int) -> list[str]:
    """The names of a tenant's live adapters."""
    mine = select(Adapter.name).where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))
    return list(await session.scalars(mine))


async def names_in_use(session: AsyncSession, names: Iterable[str]) -> list[str]:
    """Those of `names` that a live adapter of any tenant has, sorted."""
    found = select(Adapter.name).where(Adapter.name.in_(tuple(names)), Adapter.deleted_at.is_(None))
    return sorted(set(await session.scalars(found)))
