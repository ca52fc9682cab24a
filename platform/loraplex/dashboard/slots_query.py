"""Which adapter held which slot when, and what waits now."""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, Literal, cast

from sqlalchemy import Select, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.model_ref import DEFAULT_ALIAS
from adapter_store.registry.models import Adapter, AdapterVersion, Alias, Tenant
from adapter_store.registry.rollup_models import SlotSpan as SpanRow
from adapter_store.registry.rollup_models import WaitingQueue
from engine.telemetry.labels import name_of, version_of
from engine.telemetry.records import AdapterOwner
from loraplex.dashboard.bucket_query import axis_of, engine_buckets
from loraplex.dashboard.engine_views import SlotMark, SlotOwner, Slots, SlotSpan, Wait
from loraplex.dashboard.progress_query import progress
from loraplex.dashboard.views import Window
from loraplex.recorder.rows import stay_of
from loraplex.recorder.slot_book import Stay
from loraplex.recorder.widths import Range

MAX_SPANS = 2000
MAX_WAITS = 100
NEWEST_SECONDS = 5.0


async def slots(session: AsyncSession, tenant: str | None, range_: Range, now: float) -> Slots:
    """The slots page; what is another tenant's has no name."""
    done = await progress(session)
    axis = axis_of(range_, now, await engine_buckets(session, range_, now))
    in_window = or_(SpanRow.ended.is_(None), SpanRow.ended >= axis.begin), SpanRow.slot.is_not(None)
    stays = await _stays(
        session,
        select(SpanRow).where(*in_window).order_by(SpanRow.began.desc(), SpanRow.id.desc()),
        MAX_SPANS + 1,
    )
    cut = stays.pop().ended if len(stays) > MAX_SPANS else None
    stays.reverse()
    window = axis.window(done.complete_until)
    return await _view(session, tenant, window, done.slots_total, stays, cut)


async def newest_slots(session: AsyncSession, tenant: str | None, now: float) -> Slots:
    """The event `slots`: what lasts, what ended just now, and what waits."""
    done = await progress(session)
    since = now - NEWEST_SECONDS
    newest = or_(SpanRow.ended.is_(None), SpanRow.ended >= since), SpanRow.slot.is_not(None)
    stays = await _stays(
        session, select(SpanRow).where(*newest).order_by(SpanRow.began, SpanRow.id), MAX_SPANS
    )
    window = Window("5m", since, now, NEWEST_SECONDS, [], done.complete_until)
    return await _view(session, tenant, window, done.slots_total, stays, None)


async def _view(
    session: AsyncSession, tenant: str | None, window: Window, slots_total: int,
    stays: Sequence[Stay], truncated_before: float | None,
) -> Slots:  # fmt: skip
    marks = _marks(stays, tenant, window.start)
    pinned = await _pinned(session, tenant)
    return Slots(
        window=window,
        slots_total=slots_total,
        spans=[_span(stay, tenant, pinned) for stay in stays],
        marks=marks,
        waits=await waits(session, tenant, window.end),
        evictions=sum(mark.kind == "evicted" for mark in marks),
        loads=sum(mark.kind == "loaded" for mark in marks),
        truncated_before=truncated_before,
    )


async def waits(session: AsyncSession, tenant: str | None, now: float) -> list[Wait]:
    """Queues in which something waits, the longest wait first."""
    query = select(WaitingQueue).where(WaitingQueue.waiting > 0)
    if tenant is not None:
        query = query.where(WaitingQueue.tenant == tenant)
    rows = await session.scalars(query.order_by(WaitingQueue.waits_since).limit(MAX_WAITS))
    coming = await _coming(session)
    return [
        Wait(
            tenant=row.tenant,
            adapter=row.adapter,
            version=row.version or None,
            cause=cast(Any, row.cause or "turn"),
            waiting=row.waiting,
            running=row.running,
            oldest_seconds=max(0.0, now - (row.waits_since or now)),
            reserved_slot=coming.get((row.tenant, row.adapter, row.version)),
        )
        for row in rows
    ]


async def _coming(session: AsyncSession) -> dict[tuple[str, str, int], int]:
    """The slot that is about to be an adapter version's. Several that are drained at once go to
    whoever waits longest, whichever is free first: what is told is whom each is drained for."""
    rows = await session.scalars(
        select(SpanRow).where(
            SpanRow.ended.is_(None), SpanRow.kind.in_(("reserved", "draining", "loading"))
        )
    )
    stays = [stay_of(row) for row in rows]
    draining = {stay.slot for stay in stays if stay.kind == "draining"}
    return {
        (owner.tenant, name_of(owner.label), version_of(owner.label) or 0): stay.slot
        for stay in stays
        if stay.slot is not None
        and (stay.kind == "loading" or (stay.kind == "reserved" and stay.slot in draining))
        for owner in stay.owners
    }


async def _stays(session: AsyncSession, query: Select[SpanRow], limit: int) -> list[Stay]:
    """Stays with their owners: of what was only pinned so far, the registry knows whose it is."""
    stays = [stay_of(row) for row in await session.scalars(query.limit(limit))]
    unknown = {stay.digest for stay in stays if not stay.owners}
    if unknown:
        owners = await _owners(session, unknown)
        stays = [
            stay if stay.owners else replace(stay, owners=tuple(owners.get(stay.digest, ())))
            for stay in stays
        ]
    return stays


async def _owners(session: AsyncSession, digests: set[str]) -> dict[str, list[AdapterOwner]]:
    versions = await session.execute(
        select(AdapterVersion.digest, Tenant.name, Adapter.name.label("adapter"),
               AdapterVersion.number)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(AdapterVersion.digest.in_(digests))
        .order_by(AdapterVersion.id.desc())
    )  # fmt: skip
    owners: dict[str, list[AdapterOwner]] = {}
    for version in versions:
        owner = AdapterOwner(version.name, f"{version.adapter}@{version.number}")
        owners.setdefault(version.digest, []).append(owner)
    return owners


async def _pinned(session: AsyncSession, tenant: str | None) -> Set[str]:
    """Weights that are pinned, and whose pin may be seen: those that `default` of a pinned adapter
    points to."""
    query = (
        select(AdapterVersion.digest)
        .join(Alias, Alias.version_id == AdapterVersion.id)
        .join(Adapter, Adapter.id == Alias.adapter_id)
        .where(
            Alias.name == DEFAULT_ALIAS,
            Adapter.residency != literal_column("'auto'"),  # what the partial index is for
            Adapter.residency == "pinned",
            Adapter.deleted_at.is_(None),
        )
    )
    if tenant is not None:
        query = query.join(Tenant, Tenant.id == Adapter.tenant_id).where(Tenant.name == tenant)
    return frozenset(await session.scalars(query))


def owner_of(stay: Stay, tenant: str | None) -> AdapterOwner | None:
    """An owner whom a viewer may see; None if there is none."""
    return next((owner for owner in stay.owners if tenant in (None, owner.tenant)), None)


def _span(stay: Stay, tenant: str | None, pinned: Set[str]) -> SlotSpan:
    owner = owner_of(stay, tenant)
    others = [o for o in stay.owners if o != owner and tenant in (None, o.tenant)]
    return SlotSpan(
        slot=stay.slot or 0,
        tenant=owner.tenant if owner else None,
        adapter=name_of(owner.label) if owner else None,
        version=version_of(owner.label) if owner else None,
        kind=cast(Any, stay.kind),
        start=stay.began,
        end=stay.ended,
        is_pinned=stay.digest in pinned,
        also=[SlotOwner(o.tenant, name_of(o.label), version_of(o.label)) for o in others],
    )


def _marks(stays: Sequence[Stay], tenant: str | None, since: float) -> list[SlotMark]:
    """Adapters that came into a slot, left it, or failed on their way, in the order of time. One
    whose drain was called off did neither."""
    marks: list[SlotMark] = []
    before: dict[int | None, Stay] = {}

    def note_end(stay: Stay) -> None:
        if stay.ended is not None:
            kind = "failed" if stay.kind == "loading" else "evicted"
            marks.append(_mark(stay, kind, stay.ended, tenant))

    for stay in stays:
        if stay.kind == "reserved":
            continue
        former, before[stay.slot] = before.get(stay.slot), stay
        was = None
        if former is not None:
            if (former.digest, former.ended) == (stay.digest, stay.began):
                was = former.kind
            else:
                note_end(former)
        if stay.kind == "resident" and was != "draining":
            marks.append(_mark(stay, "loaded", stay.began, tenant))
    for stay in before.values():
        note_end(stay)
    return sorted((mark for mark in marks if mark.at >= since), key=lambda mark: mark.at)


def _mark(
    stay: Stay, kind: Literal["loaded", "evicted", "failed"], at: float, tenant: str | None
) -> SlotMark:
    owner = owner_of(stay, tenant)
    names = (owner.tenant, name_of(owner.label)) if owner else (None, None)
    return SlotMark(stay.slot or 0, *names, kind, at)
