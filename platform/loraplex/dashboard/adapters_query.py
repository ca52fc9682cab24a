"""The table of adapters: sorted, searched and paged by the database, over thousands of rows.

Rows are those of `AdapterStanding`, which the recorder keeps for each window, and beside them the
adapters that have none: registered, and without traffic.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    case,
    cast,
    exists,
    func,
    literal,
    literal_column,
    null,
    select,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.model_ref import BASE_NAME
from adapter_store.registry.models import Adapter, Tenant
from adapter_store.registry.rollup_models import AdapterStanding, SlotSpan, WaitingQueue
from engine.telemetry.labels import name_of
from loraplex.dashboard.adapter_views import AdapterRow, Adapters, AdapterSort
from loraplex.dashboard.bucket_query import axis_of, engine_buckets
from loraplex.dashboard.progress_query import progress
from loraplex.dashboard.views import Causes, Finishes, Percentiles
from loraplex.recorder.widths import SPANS, Range

MAX_LIMIT = 200
_FIGURES = (
    "requests", "output_tokens", "queue_p50", "queue_p95", "queue_p99", "queue_seconds", "load_p95",
    "ttft_p95", "token_time_p95", "token_gap_p95", "length_share", "resident_share", "last_request",
    "figures",
)  # fmt: skip
_NO_FIGURES: dict[str, Any] = {
    "prompt_tokens": 0, "cached_tokens": 0, "preemptions": 0, "loads": 0, "causes": {},
    "finishes": {}, "load": [None] * 3, "ttft": [None] * 3, "token_time": [None] * 3,
    "token_gap": [None] * 3, "spark_requests": [], "spark_queue": [],
}  # fmt: skip
_COUNTS = ("requests", "output_tokens", "queue_seconds")

Residency = Literal["slot", "loading", "host", "absent", "base"]
Names = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Places:
    """Where adapters are now, and which of them are to stay there, by tenant and name."""

    held: Mapping[Names, Residency]
    """Those in a slot, and on their way into one."""
    kept: Mapping[Names, Literal["warm", "pinned"]]

    def of(self, tenant: str, adapter: str) -> Residency:
        """Where one is."""
        name = tenant, adapter
        return self.held.get(name, "host" if name in self.kept else "absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableQuery:
    """What of the table is wanted."""

    range_: Range
    tenant: str | None
    """None: all tenants'."""
    sort: AdapterSort = "requests"
    descending: bool = True
    search: str = ""
    offset: int = 0
    limit: int = 50


async def adapters_table(session: AsyncSession, query: TableQuery, now: float) -> Adapters:
    """A page of the table: six statements, with a search seven, whatever its length."""
    done = await progress(session)
    engine = await engine_buckets(session, query.range_, now)
    rows = _rows(SPANS[query.range_].seconds, query.tenant).subquery()
    known = await session.scalar(select(func.count()).select_from(rows)) or 0
    matches = _matches(rows, query.search)
    total = known
    if query.search:
        total = await session.scalar(select(func.count()).select_from(rows).where(matches)) or 0
    queues = _queues()
    page = await session.execute(
        select(rows, queues.c.waiting, queues.c.running, queues.c.cause)
        .outerjoin(
            queues, and_(queues.c.tenant == rows.c.tenant, queues.c.adapter == rows.c.adapter)
        )
        .where(matches)
        .order_by(*_order(query, rows, queues))
        .offset(query.offset)
        .limit(query.limit)
    )
    places = await slot_places(session)
    return Adapters(
        window=axis_of(query.range_, now, engine).window(done.complete_until),
        rows=[row_of(row, places) for row in page],
        total=total,
        known=known,
        offset=query.offset,
    )


async def standing_row(
    session: AsyncSession, tenant: str, adapter: str, values: dict[str, Any] | None
) -> AdapterRow:
    """One adapter's row, from the columns that `standing_of` computed for it."""
    queues = _queues()
    now = await session.execute(
        select(queues.c.waiting, queues.c.running, queues.c.cause).where(
            queues.c.tenant == tenant, queues.c.adapter == adapter
        )
    )
    queue = now.one_or_none()
    figures = values or dict.fromkeys(_FIGURES)
    mapping = {
        "tenant": tenant, "adapter": adapter, **figures,
        "waiting": queue.waiting if queue else None, "running": queue.running if queue else None,
        "cause": queue.cause if queue else None,
    }  # fmt: skip
    return _row(mapping, await slot_places(session))


def _rows(span: int, tenant: str | None) -> Any:
    """All rows of the table, those without traffic included."""
    standing = select(
        AdapterStanding.tenant, AdapterStanding.adapter,
        *(getattr(AdapterStanding, name) for name in _FIGURES),
    ).where(AdapterStanding.span == span)  # fmt: skip
    has_row = exists().where(
        AdapterStanding.span == span,
        AdapterStanding.tenant == Tenant.name,
        AdapterStanding.adapter == Adapter.name,
    )
    idle: Select[Any] = (
        select(
            Tenant.name.label("tenant"), Adapter.name.label("adapter"),
            *(_nothing(name).label(name) for name in _FIGURES),
        )
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(Adapter.deleted_at.is_(None), ~has_row)
    )  # fmt: skip
    if tenant is not None:
        standing = standing.where(AdapterStanding.tenant == tenant)
        idle = idle.where(Tenant.name == tenant)
    return union_all(standing, idle)


def _nothing(name: str) -> ColumnElement[Any]:
    column = getattr(AdapterStanding, name)
    value = literal(0) if name in _COUNTS else null()
    return cast(value, column.type)


def _queues() -> Any:
    """What waits and runs now, all versions of an adapter together."""
    return (
        select(
            WaitingQueue.tenant, WaitingQueue.adapter,
            func.sum(WaitingQueue.waiting).label("waiting"),
            func.sum(WaitingQueue.running).label("running"),
            func.max(WaitingQueue.cause).label("cause"),
        )
        .group_by(WaitingQueue.tenant, WaitingQueue.adapter)
        .subquery()
    )  # fmt: skip


def _matches(rows: Any, search: str) -> ColumnElement[bool]:
    """`search` is part of `tenant/adapter`; names have no capitals."""
    if not search:
        return literal(True)
    if "\0" in search:  # PostgreSQL refuses such a text, and no name has it
        return literal(False)
    return (rows.c.tenant + "/" + rows.c.adapter).contains(search.lower(), autoescape=True)


def _order(query: TableQuery, rows: Any, queues: Any) -> Iterable[ColumnElement[Any]]:
    """By the column, rows without a figure last; then by name, so that pages never overlap."""
    names = (rows.c.adapter, rows.c.tenant)
    if query.sort == "adapter":
        return [name.desc() if query.descending else name.asc() for name in names]
    column = queues.c.waiting if query.sort == "waiting" else rows.c[query.sort]
    ordered = column.desc() if query.descending else column.asc()
    return [case((column.is_(None), 1), else_=0), ordered, *names]


async def slot_places(session: AsyncSession) -> Places:
    """Adapters that hold a slot now, are on their way into one, or are kept somewhere."""
    rows = await session.execute(
        select(SlotSpan.kind, SlotSpan.owners).where(
            SlotSpan.ended.is_(None), SlotSpan.kind != "reserved"
        )
    )
    held: dict[Names, Residency] = {}
    for row in rows:
        for tenant, label in row.owners:
            place: Residency = "loading" if row.kind == "loading" else "slot"
            held.setdefault((tenant, name_of(label)), place)
    kept = await session.execute(
        select(Tenant.name.label("tenant"), Adapter.name, Adapter.residency)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(Adapter.residency != literal_column("'auto'"), Adapter.deleted_at.is_(None))
    )
    return Places(held, {(row.tenant, row.name): row.residency for row in kept})


def row_of(row: Any, places: Places) -> AdapterRow:
    """A row of the table's query."""
    return _row(row._mapping, places)


def _row(values: Any, places: Places) -> AdapterRow:
    figures = _NO_FIGURES | (values["figures"] or {})  # a row of an older release has not all
    tenant, adapter = values["tenant"], values["adapter"]
    is_base = adapter == BASE_NAME
    return AdapterRow(
        tenant=tenant,
        adapter=adapter,
        is_base=is_base,
        requests=values["requests"] or 0,
        running=int(values["running"] or 0),
        waiting=int(values["waiting"] or 0),
        waits_for=values["cause"],
        queue=Percentiles(values["queue_p50"], values["queue_p95"], values["queue_p99"]),
        causes=Causes(**figures["causes"]),
        load=Percentiles(*figures["load"]),
        loads=figures["loads"],
        ttft=Percentiles(*figures["ttft"]),
        token_time=Percentiles(*figures["token_time"]),
        token_gap=Percentiles(*figures["token_gap"]),
        prompt_tokens=figures["prompt_tokens"],
        cached_tokens=figures["cached_tokens"],
        output_tokens=values["output_tokens"] or 0,
        finishes=Finishes(**figures["finishes"]),
        preemptions=figures["preemptions"],
        residency="base" if is_base else places.of(tenant, adapter),
        resident_share=None if is_base else values["resident_share"],
        last_request=values["last_request"],
        spark_requests=figures["spark_requests"],
        spark_queue=figures["spark_queue"],
        kept=places.kept.get((tenant, adapter), "auto"),
    )
