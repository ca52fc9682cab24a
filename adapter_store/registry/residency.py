"""Residency: which adapters are pinned to a slot or kept in host memory, whatever their use.

Set by adapter name; it holds for the version that the alias `default` names, and so moves with it.
Limits count files: names whose versions have one digest take one place together. A move of
`default` is never refused for a limit, so more names may be marked than there are places: then the
oldest names have them.
"""

from typing import NamedTuple

from sqlalchemy import literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from adapter_store.errors import ResidencyLimit
from adapter_store.model_ref import DEFAULT_ALIAS
from adapter_store.registry import adapters
from adapter_store.registry.audit import Change
from adapter_store.registry.models import Adapter, AdapterVersion, Alias, Tenant
from adapter_store.registry.records import (
    AdapterInfo,
    Residency,
    ResidencyLimits,
    ResidentAdapters,
)
from adapter_store.registry.versions import is_within


class _Kept(NamedTuple):
    adapter_id: int
    digest: str
    bytes: int
    residency: str


async def set_residency(
    session: AsyncSession,
    change: Change,
    tenant: str,
    name: str,
    wanted: Residency,
    limits: ResidencyLimits,
) -> AdapterInfo:
    """Keep an adapter as `wanted`; `auto` always succeeds, as does what is the case already.

    Raises `TenantNotFound`, `AdapterNotFound` or `ResidencyLimit`.
    """
    # One change after the other, or two would both take the last place. SQLite has one writer
    # anyway; elsewhere the oldest tenant's row is the lock.
    oldest = select(Tenant.id).order_by(Tenant.id).limit(1)
    await session.execute(oldest.with_for_update(key_share=True))
    adapter = await adapters.find(session, tenant, name, lock=True)
    previous = adapter.residency
    if wanted != previous:
        adapter.residency = wanted
        await session.flush()
        if wanted != "auto":
            kept = await _kept(
                session, limits.base_fingerprint, limits.max_rank, limits.max_full_values
            )
            _check(kept, adapter, wanted, limits)
        change.record(session, "residency.set", tenant, name, residency=wanted, previous=previous)
    return await adapters.get(session, tenant, name)


async def resident(
    session: AsyncSession,
    base_fingerprint: str,
    max_rank: int | None = None,
    max_full_values: int | None = None,
) -> ResidentAdapters:
    """Pinned and warm digests of a base model's adapters, of those within the limits."""
    kept = await _kept(session, base_fingerprint, max_rank, max_full_values)
    pinned = dict.fromkeys(row.digest for row in kept if row.residency == "pinned")
    warm = dict.fromkeys(row.digest for row in kept if row.digest not in pinned)
    return ResidentAdapters(tuple(pinned), tuple(warm))


def _check(kept: list[_Kept], adapter: Adapter, wanted: Residency, limits: ResidencyLimits) -> None:
    if all(row.adapter_id != adapter.id for row in kept):
        raise ResidencyLimit(
            "no_default_version",
            f"the alias {DEFAULT_ALIAS!r} of {adapter.name!r} names no version that is served now: "
            "publish one",
        )
    pinned = {row.digest for row in kept if row.residency == "pinned"}
    warm = {row.digest for row in kept if row.residency == "warm"} - pinned
    if wanted == "pinned" and len(pinned) > limits.max_pinned:
        raise ResidencyLimit(
            "pin_limit_exceeded",
            f"at most {limits.max_pinned} adapters can be pinned (max_loras - 1); unpin another",
        )
    if wanted == "warm" and len(warm) > limits.max_warm:
        raise ResidencyLimit(
            "warm_limit_exceeded",
            f"at most {limits.max_warm} adapters can be warm (max_cpu_loras - max_loras)",
        )
    num_bytes = sum({row.digest: row.bytes for row in kept}.values())
    if num_bytes > limits.max_bytes:
        raise ResidencyLimit(
            "host_memory_exceeded",
            f"pinned and warm adapters would have {num_bytes} bytes; host memory for adapters "
            f"(cpu_lora_bytes) is {limits.max_bytes}",
        )


async def _kept(
    session: AsyncSession, base_fingerprint: str, max_rank: int | None, max_full_values: int | None
) -> list[_Kept]:
    # First the few, by the partial index, whose condition this is: not first all the aliases.
    kept = aliased(Adapter)
    few = select(kept.id).where(kept.residency != literal_column("'auto'"))
    query = (
        select(Adapter.id, AdapterVersion.digest, AdapterVersion.bytes, Adapter.residency)
        .join(Alias, Alias.adapter_id == Adapter.id)
        .join(AdapterVersion, AdapterVersion.id == Alias.version_id)
        .where(Alias.name == DEFAULT_ALIAS, Alias.adapter_id.in_(few))
        .where(AdapterVersion.base_fingerprint == base_fingerprint)
        .where(is_within(max_rank, max_full_values))
        .order_by(Adapter.id)
    )
    return [_Kept(*row) for row in await session.execute(query)]
