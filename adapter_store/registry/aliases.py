"""Aliases: movable names of versions. `default` is what an adapter's bare name means."""

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from adapter_store.errors import AliasConflict, AliasNotFound, InvalidField, QuotaExceeded
from adapter_store.model_ref import check_alias
from adapter_store.registry import adapters, replies
from adapter_store.registry.audit import Change
from adapter_store.registry.models import Adapter, AdapterVersion, Alias
from adapter_store.registry.records import AliasChange, Canary
from adapter_store.registry.replies import RepeatableCall

MAX_ALIASES = 100
"""Of an adapter: each of its replies names them all."""


async def set_alias(
    session: AsyncSession,
    change: Change,
    tenant: str,
    name: str,
    alias: str,
    version: int,
    expect: int | None,
    canary: Canary | None,
    repeatable: RepeatableCall | None,
) -> AliasChange:
    """Point an alias, new or old, to a version and its canary, or to a version alone.

    With `expect` it moves only if it points to that version now. Raises `InvalidName`,
    `InvalidField`, `TenantNotFound`, `AdapterNotFound`, `VersionNotFound`, `AliasConflict`,
    `QuotaExceeded` or `IdempotencyKeyReused`.
    """
    check_alias(alias)
    adapter = await adapters.find(session, tenant, name, lock=True)
    if repeatable is not None:
        stored = await replies.recall(session, adapter.tenant_id, repeatable, change.now)
        if stored is not None:
            return msgspec.convert({**stored, "replayed": True}, AliasChange)
    target = await adapters.find_version(session, adapter, version)
    other = await _canary_version(session, adapter, version, canary)
    share = canary.share if canary is not None else None
    previous = await point(session, change, tenant, name, alias, target, expect, other, share)
    moved = AliasChange(alias, version, previous, canary)
    if repeatable is not None:
        await replies.remember(session, adapter.tenant_id, repeatable, moved, change.now)
    return moved


async def _canary_version(
    session: AsyncSession, adapter: Adapter, version: int, canary: Canary | None
) -> AdapterVersion | None:
    if canary is None:
        return None
    if not 0 <= canary.share <= 1:
        raise InvalidField("canary.share", f"a canary's share is 0 to 1, not {canary.share}")
    if canary.version == version:
        raise InvalidField("canary.version", "a canary is another version than the alias's own")
    return await adapters.find_version(session, adapter, canary.version)


async def point(
    session: AsyncSession,
    change: Change,
    tenant: str,
    name: str,
    alias: str,
    target: AdapterVersion,
    expect: int | None = None,
    canary: AdapterVersion | None = None,
    share: float | None = None,
) -> int | None:
    """Point `alias` to a version of an adapter whose row is locked; return the former version."""
    other = aliased(AdapterVersion)
    found = (
        await session.execute(
            select(Alias, AdapterVersion.number, other.number)
            .join(AdapterVersion, AdapterVersion.id == Alias.version_id)
            .outerjoin(other, other.id == Alias.canary_version_id)
            .where(Alias.adapter_id == target.adapter_id, Alias.name == alias)
        )
    ).one_or_none()
    row, current, former_canary = (found[0], found[1], found[2]) if found else (None, None, None)
    if expect is not None and current != expect:
        now = "does not exist" if current is None else f"points to version {current}"
        raise AliasConflict(f"the alias {alias!r} {now}; expected version {expect}")
    wanted = (target.id, canary.id if canary is not None else None, share)
    if row is None:
        await _check_number(session, target.adapter_id, name)
        row = Alias(adapter_id=target.adapter_id, name=alias)
        session.add(row)
    elif (row.version_id, row.canary_version_id, row.canary_share) == wanted:
        return current
    detail = {"version": target.number, "previous": current}
    if canary is not None or former_canary is not None:
        detail |= {
            "canary": canary.number if canary is not None else None,
            "share": share,
            "previous_canary": former_canary,
            "previous_share": row.canary_share,
        }
    row.version_id, row.canary_version_id, row.canary_share = wanted
    row.updated_at = change.now
    change.record(session, "alias.set", tenant, f"{name}:{alias}", **detail)
    await session.flush()
    return current


async def _check_number(session: AsyncSession, adapter_id: int, name: str) -> None:
    number = await session.scalar(select(func.count()).where(Alias.adapter_id == adapter_id))
    if (number or 0) >= MAX_ALIASES:
        raise QuotaExceeded(
            "too_many_aliases", f"the adapter {name!r} has {number} aliases; delete one first"
        )


async def remove(session: AsyncSession, change: Change, tenant: str, name: str, alias: str) -> None:
    """Delete an alias: raises `InvalidName`, `TenantNotFound`, `AdapterNotFound`, `AliasNotFound`.

    Without `default` an adapter's bare name means nothing; its versions still have their numbers.
    """
    check_alias(alias)
    adapter = await adapters.find(session, tenant, name, lock=True)
    row = await session.scalar(
        select(Alias).where(Alias.adapter_id == adapter.id, Alias.name == alias)
    )
    if row is None:
        raise AliasNotFound(f"the adapter {name!r} has no alias {alias!r}")
    await session.delete(row)
    change.record(session, "alias.delete", tenant, f"{name}:{alias}")
    await session.flush()
