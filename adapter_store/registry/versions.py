"""Versions of adapters: immutable, numbered from 1, no number given out twice.

A number is the counter of the adapter's row plus one. The row is locked meanwhile (SQLite: the one
writer), and survives a delete of the adapter, so neither races nor deletes can repeat a number.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import msgspec
from sqlalchemy import BigInteger, ColumnElement, and_, exists, func, select, true
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from adapter_store.errors import ModelNotFound, VersionInUse
from adapter_store.model_ref import (
    DEFAULT_ALIAS,
    MAX_TOLD,
    ModelRef,
    alias_not_found,
    check_version_page,
    model_not_found,
    version_not_found,
)
from adapter_store.peft_format import InspectedAdapter
from adapter_store.registry import adapters, aliases, quotas, replies, tenants
from adapter_store.registry.audit import Change
from adapter_store.registry.models import Adapter, AdapterVersion, Alias, Tenant
from adapter_store.registry.records import (
    AS_THE_BASE,
    RegisteredVersion,
    ResolvedAdapter,
    Route,
    ServingDefaults,
    VersionInfo,
)
from adapter_store.registry.replies import RepeatableCall

READY = "ready"
MAX_PARAMETERS = 500
"""Of one statement; SQLite takes 32,766, older ones 999."""


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What is uploaded; the same again makes no second version."""

    inspected: InspectedAdapter
    base_fingerprint: str
    serving: ServingDefaults

    def is_same_as(self, version: AdapterVersion) -> bool:
        """Whether they answer alike: equal digest and serving defaults, for the same base model."""
        return (
            version.digest == self.inspected.digest
            and version.base_fingerprint == self.base_fingerprint
            and _serving(version.serving) == self.serving
        )


async def register(
    session: AsyncSession, change: Change, tenant: str, name: str, new: NewVersion, *,
    publish: bool, repeatable: RepeatableCall | None, tenant_created_at: datetime | None = None,
) -> RegisteredVersion:  # fmt: skip
    """Give an upload its number, unless the newest version is the same already.

    With `publish` the alias `default` points to the version returned, new or not; without, no alias
    moves. Raises `TenantNotFound`, `IdempotencyKeyReused` or `QuotaExceeded`.
    """
    owner = await tenants.find(session, tenant, lock="keep", created_at=tenant_created_at)
    if repeatable is not None:
        stored = await replies.recall(session, owner.id, repeatable, change.now)
        if stored is not None:
            return msgspec.convert({**stored, "replayed": True}, RegisteredVersion)
    adapter = await _revive(session, change, owner.id, name)
    version = await _newest(session, adapter.id)
    created = False
    if version is None or not new.is_same_as(version):
        await quotas.check_new_version(session, owner, new.inspected)
        version, created = await _add(session, adapter, new, change), True
        change.record(
            session, "version.create", tenant, f"{name}@{version.number}",
            digest=version.digest, published=publish,
        )  # fmt: skip
    previous = None
    if publish:
        previous = await aliases.point(session, change, tenant, name, DEFAULT_ALIAS, version)
    registered = RegisteredVersion(
        name=name,
        version=version.number,
        digest=version.digest,
        created=created,
        published=publish,
        previous=previous,
        report=version.report,
    )
    if repeatable is not None:
        await replies.remember(session, owner.id, repeatable, registered, change.now)
    return registered


async def resolve(session: AsyncSession, tenant: str, ref: ModelRef) -> Route:
    """Where a reference leads; raises `ModelNotFound`.

    It is the same for what is unknown, another tenant's or deleted; of an adapter of the tenant's
    own it says what there is.
    """
    if ref.version is None:
        return await _resolve_alias(session, tenant, ref, ref.alias or DEFAULT_ALIAS)
    found = (
        await session.execute(
            select(*_resolved_columns(AdapterVersion))
            .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
            .join(Tenant, Tenant.id == Adapter.tenant_id)
            .where(Tenant.name == tenant, Adapter.name == ref.name)
            .where(AdapterVersion.number == ref.version)
        )
    ).one_or_none()
    if found is None:
        raise await _not_found(session, tenant, ref)
    return Route(str(ref), _resolved(tenant, ref.name, *found))


async def _resolve_alias(session: AsyncSession, tenant: str, ref: ModelRef, alias: str) -> Route:
    canary = aliased(AdapterVersion)
    query = (
        select(
            *_resolved_columns(AdapterVersion), *_resolved_columns(canary), Alias.canary_share
        )
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .join(Alias, Alias.version_id == AdapterVersion.id)
        .outerjoin(canary, canary.id == Alias.canary_version_id)
        .where(Tenant.name == tenant, Adapter.name == ref.name, Alias.name == alias)
    )  # fmt: skip
    found = (await session.execute(query)).one_or_none()
    if found is None:
        raise await _not_found(session, tenant, ref)
    # An outer join: without a canary its columns are null.
    columns = cast("tuple[Any, ...]", found)
    stable, behind, share = columns[:6], columns[6:12], columns[12]
    return Route(
        f"{tenant}/{ref.name}:{alias}",
        _resolved(tenant, ref.name, *stable),
        _resolved(tenant, ref.name, *behind) if behind[0] is not None else None,
        share or 0.0,
    )


async def _not_found(session: AsyncSession, tenant: str, ref: ModelRef) -> ModelNotFound:
    # A deleted adapter has no versions, so nobody can tell it from one that never was.
    mine = (Tenant.name == tenant) & (Adapter.name == ref.name)
    numbers = (
        await session.scalars(
            select(AdapterVersion.number)
            .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
            .join(Tenant, Tenant.id == Adapter.tenant_id)
            .where(mine)
            .order_by(AdapterVersion.number.desc())
            .limit(MAX_TOLD + 1)
        )
    ).all()
    if not numbers:
        return model_not_found(str(ref))
    if ref.version is not None:
        return version_not_found(ref, numbers)
    names = await session.scalars(
        select(Alias.name)
        .join(Adapter, Adapter.id == Alias.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(mine)
        .order_by(Alias.name)
        .limit(MAX_TOLD + 1)
    )
    return alias_not_found(ref, names.all(), numbers[0])


def _resolved_columns(version: type[AdapterVersion]) -> tuple[Any, ...]:
    columns = (version.number, version.digest, version.base_fingerprint, version.serving)
    return *columns, version.rank, _full_values_of(version)


def is_within(max_rank: int | None, max_full_values: int | None) -> ColumnElement[bool]:
    """The condition that a version has no more of either; None: it may have any."""
    conditions: list[ColumnElement[bool]] = [true()]
    if max_rank is not None:
        conditions.append(AdapterVersion.rank <= max_rank)
    if max_full_values is not None:
        conditions.append(_full_values_of(AdapterVersion) <= max_full_values)
    return and_(*conditions)


def _full_values_of(version: type[AdapterVersion]) -> ColumnElement[int]:
    # Reports from before there were any name none. They can be more than 2**31.
    values = sql_cast(version.report["full_values"].as_string(), BigInteger)
    return func.coalesce(values, 0)


def _resolved(
    tenant: str, name: str, number: int, digest: str, base: str,
    serving: dict[str, Any] | None, rank: int, full_values: int,
) -> ResolvedAdapter:  # fmt: skip
    return ResolvedAdapter(tenant, name, number, digest, base, _serving(serving), rank, full_values)


def _serving(stored: dict[str, Any] | None) -> ServingDefaults:
    return AS_THE_BASE if stored is None else msgspec.convert(stored, ServingDefaults)


async def list_of(
    session: AsyncSession, tenant: str, name: str,
    limit: int | None = None, after: str = "",
) -> list[VersionInfo]:  # fmt: skip
    """An adapter's versions, newest first: all, or the first `limit` of those after a number.

    Raises `TenantNotFound`, `AdapterNotFound` or `InvalidField` (after).
    """
    adapter = await adapters.find(session, tenant, name)
    pointing: dict[int, list[str]] = {}
    for version_id, alias in await session.execute(
        select(Alias.version_id, Alias.name)
        .where(Alias.adapter_id == adapter.id)
        .order_by(Alias.name)
    ):
        pointing.setdefault(version_id, []).append(alias)
    query = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id)
    if after:
        query = query.where(AdapterVersion.number < check_version_page(after))
    rows = await session.scalars(query.order_by(AdapterVersion.number.desc()).limit(limit))
    return [_info(name, row, tuple(pointing.get(row.id, ()))) for row in rows]


async def get(session: AsyncSession, tenant: str, name: str, number: int) -> VersionInfo:
    """Raises `TenantNotFound`, `AdapterNotFound` or `VersionNotFound`."""
    adapter = await adapters.find(session, tenant, name)
    version = await adapters.find_version(session, adapter, number)
    pointing = await session.scalars(
        select(Alias.name).where(Alias.version_id == version.id).order_by(Alias.name)
    )
    return _info(name, version, tuple(pointing))


async def remove(
    session: AsyncSession, change: Change, tenant: str, name: str, number: int
) -> list[str]:
    """Delete a version, and with the last one the adapter.

    Returns its digest if no version of any tenant names it any more. Raises `TenantNotFound`,
    `AdapterNotFound`, `VersionNotFound`, or `VersionInUse` while an alias points to it.
    """
    adapter = await adapters.find(session, tenant, name, lock=True)
    version = await adapters.find_version(session, adapter, number)
    pointing = await session.scalars(
        select(Alias.name)
        .where((Alias.version_id == version.id) | (Alias.canary_version_id == version.id))
        .order_by(Alias.name)
    )
    if names := ", ".join(pointing):
        raise VersionInUse(f"version {number} of {name!r} is in use by the alias {names}")
    digest = version.digest
    await session.delete(version)
    await session.flush()
    change.record(session, "version.delete", tenant, f"{name}@{number}", digest=digest)
    if await _newest(session, adapter.id) is None:
        adapter.deleted_at = change.now
        adapter.residency = "auto"
        change.record(session, "adapter.delete", tenant, name, last_version=adapter.last_version)
    return [] if await is_live(session, digest) else [digest]


async def is_live(session: AsyncSession, digest: str) -> bool:
    """Whether a version of any tenant names the digest."""
    return bool(await session.scalar(select(exists().where(AdapterVersion.digest == digest))))


async def live_digests(
    session: AsyncSession,
    digests: Iterable[str],
    max_rank: int | None = None,
    max_full_values: int | None = None,
) -> set[str]:
    """Those of `digests` that a version of any tenant names, of those within the limits."""
    asked = tuple(digests)
    within = is_within(max_rank, max_full_values)
    live: set[str] = set()
    for start in range(0, len(asked), MAX_PARAMETERS):
        chunk = asked[start : start + MAX_PARAMETERS]
        found = select(AdapterVersion.digest).where(AdapterVersion.digest.in_(chunk), within)
        live.update(await session.scalars(found))
    return live


async def digests_in_use(session: AsyncSession) -> list[str]:
    """Every digest that a version of any tenant names, sorted."""
    return list(
        await session.scalars(
            select(AdapterVersion.digest).distinct().order_by(AdapterVersion.digest)
        )
    )


async def _revive(session: AsyncSession, change: Change, tenant_id: int, name: str) -> Adapter:
    adapter = await adapters.find_row(session, tenant_id, name, lock=True)
    if adapter is None:
        adapter = Adapter(
            tenant_id=tenant_id, name=name, last_version=0, created_at=change.now, deleted_at=None
        )
        session.add(adapter)
        await session.flush()
    elif adapter.deleted_at is not None:
        adapter.created_at = change.now
        adapter.deleted_at = None
    return adapter


async def _newest(session: AsyncSession, adapter_id: int) -> AdapterVersion | None:
    return await session.scalar(
        select(AdapterVersion)
        .where(AdapterVersion.adapter_id == adapter_id)
        .order_by(AdapterVersion.number.desc())
        .limit(1)
    )


async def _add(
    session: AsyncSession, adapter: Adapter, new: NewVersion, change: Change
) -> AdapterVersion:
    adapter.last_version += 1
    inspected = new.inspected
    version = AdapterVersion(
        adapter_id=adapter.id,
        number=adapter.last_version,
        digest=inspected.digest,
        state=READY,
        rank=inspected.report.rank,
        bytes=inspected.report.bytes,
        config=inspected.config,
        report=msgspec.to_builtins(inspected.report),
        serving=None if new.serving == AS_THE_BASE else msgspec.to_builtins(new.serving),
        base_fingerprint=new.base_fingerprint,
        created_at=change.now,
    )
    session.add(version)
    await session.flush()
    return version


def _info(name: str, row: AdapterVersion, pointing: tuple[str, ...]) -> VersionInfo:
    return VersionInfo(
        name=name,
        version=row.number,
        digest=row.digest,
        state=row.state,
        rank=row.rank,
        bytes=row.bytes,
        base_fingerprint=row.base_fingerprint,
        config=row.config,
        report=row.report,
        serving=_serving(row.serving),
        aliases=pointing,
        created_at=row.created_at,
    )
