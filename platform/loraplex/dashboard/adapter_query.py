"""One adapter over a window: its series, versions, aliases, publishes and slowest requests."""

from collections.abc import Mapping

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from adapter_store.errors import AdapterNotFound
from adapter_store.model_ref import BASE_NAME, is_name
from adapter_store.registry.models import Adapter, AdapterVersion, Alias, Tenant
from adapter_store.registry.rollup_models import SlowRequest
from engine.telemetry.records import RequestRecord
from loraplex.dashboard.adapter_views import AdapterView, AliasRow, Moment, RequestView, VersionRow
from loraplex.dashboard.adapters_query import standing_row
from loraplex.dashboard.bucket_query import axis_of, engine_buckets, version_buckets
from loraplex.dashboard.progress_query import progress
from loraplex.dashboard.publish_query import publishes
from loraplex.dashboard.views import Causes
from loraplex.dashboard.windows import finishes_of, percentiles_of
from loraplex.recorder.ledger import HOUR
from loraplex.recorder.standings import standing_of
from loraplex.recorder.traffic import Traffic, sum_of
from loraplex.recorder.widths import SPANS, Range, bucket

MAX_SLOW = 20


async def adapter_view(
    session: AsyncSession, tenant: str, adapter: str, range_: Range, now: float
) -> AdapterView:
    """All of the adapter's page; raises `AdapterNotFound` for one without traffic or versions."""
    if not (is_name(tenant) and is_name(adapter)):  # databases refuse some other texts
        raise AdapterNotFound(f"there is no adapter {adapter[:64]!r}")
    done = await progress(session)
    engine = await engine_buckets(session, range_, now)
    axis = axis_of(range_, now, engine)
    by_version = await version_buckets(session, tenant, adapter, range_, now)
    versions = await _versions(session, tenant, adapter)
    if not by_version and not versions and not await _is_base(session, tenant, adapter):
        raise AdapterNotFound(f"there is no adapter {adapter[:64]!r}")
    parts = merged(by_version)
    values = standing_of(SPANS[range_], axis.begin, now, parts)
    totals = {version: sum_of(of.values()) for version, of in by_version.items()}
    return AdapterView(
        window=axis.window(done.complete_until),
        row=await standing_row(session, tenant, adapter, values),
        requests=axis.column(parts, lambda part: part.requests),
        causes=axis.causes(parts),
        queue=axis.percentiles(parts, "queue"),
        ttft=axis.percentiles(parts, "ttft"),
        token_gap=axis.percentiles(parts, "token_gap"),
        output_tokens=axis.column(parts, lambda part: part.output_tokens),
        finishes=axis.finishes(parts),
        versions=_version_rows(versions, totals),
        version_requests={
            str(version): axis.column(of, lambda part: part.requests)
            for version, of in sorted(by_version.items())
            if version and totals[version].requests
        },
        aliases=await _aliases(session, tenant, adapter),
        publishes=await publishes(session, tenant, adapter),
        slow_requests=await slow_requests(session, tenant, adapter, axis.begin),
    )


async def _is_base(session: AsyncSession, tenant: str, adapter: str) -> bool:
    """Whether it is the base, of a tenant that there is."""
    owner = select(Tenant.id).where(Tenant.name == tenant, Tenant.deleted_at.is_(None))
    return adapter == BASE_NAME and await session.scalar(owner) is not None


def merged(by_version: Mapping[int, Mapping[int, Traffic]]) -> dict[int, Traffic]:
    """All versions together, by bucket."""
    parts: dict[int, Traffic] = {}
    for of in by_version.values():
        for start, part in of.items():
            parts.setdefault(start, Traffic()).merge(part)
    return parts


async def _versions(session: AsyncSession, tenant: str, adapter: str) -> list[AdapterVersion]:
    rows = await session.scalars(
        select(AdapterVersion)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(Tenant.name == tenant, Adapter.name == adapter, Adapter.deleted_at.is_(None))
        .order_by(AdapterVersion.number.desc())
    )
    return list(rows)


def _version_rows(
    versions: list[AdapterVersion], totals: Mapping[int, Traffic]
) -> list[VersionRow]:
    """Those that there are, and those deleted that had traffic in the window."""
    all_requests = sum(total.requests for total in totals.values())
    known = {version.number: version for version in versions}
    gone = [v for v, total in totals.items() if v and v not in known and total.requests]
    rows: list[VersionRow] = []
    for number in sorted((*known, *gone), reverse=True):
        version, total = known.get(number), totals.get(number, Traffic())
        rows.append(
            VersionRow(
                version=number,
                published=version.created_at.timestamp() if version is not None else 0.0,
                state=version.state if version is not None else "deleted",
                rank=version.rank if version is not None else None,
                bytes=version.bytes if version is not None else None,
                requests=total.requests,
                share=total.requests / all_requests if all_requests else None,
                output_tokens=total.output_tokens,
                queue=percentiles_of(total, "queue"),
                ttft=percentiles_of(total, "ttft"),
                finishes=finishes_of(total),
            )
        )
    return rows


async def _aliases(session: AsyncSession, tenant: str, adapter: str) -> list[AliasRow]:
    canary = aliased(AdapterVersion)
    rows = await session.execute(
        select(Alias.name, AdapterVersion.number, canary.number.label("canary"), Alias.canary_share)
        .join(Adapter, Adapter.id == Alias.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .join(AdapterVersion, AdapterVersion.id == Alias.version_id)
        .outerjoin(canary, canary.id == Alias.canary_version_id)
        .where(Tenant.name == tenant, Adapter.name == adapter)
        .order_by(Alias.name)
    )
    return [AliasRow(row.name, row.number, row.canary, row.canary_share or 0.0) for row in rows]


async def slow_requests(
    session: AsyncSession, tenant: str, adapter: str, since: int
) -> list[RequestView]:
    """The slowest requests that ended since then, slowest first."""
    rows = await session.execute(
        select(SlowRequest.record)
        .where(
            SlowRequest.tenant == tenant,
            SlowRequest.adapter == adapter,
            SlowRequest.hour >= bucket(since, HOUR),
            SlowRequest.ended >= since,
        )
        .order_by(SlowRequest.seconds.desc(), SlowRequest.id)
        .limit(MAX_SLOW)
    )
    return [request_view(msgspec.msgpack.decode(row.record, type=RequestRecord)) for row in rows]


def request_view(record: RequestRecord) -> RequestView:
    """A record as the page reads it."""
    has_tokens = record.ttft is not None
    return RequestView(
        request_id=record.call,
        tenant=record.tenant,
        adapter=record.adapter or BASE_NAME,
        version=record.version,
        arrived=record.arrived,
        queue_seconds=record.queue_seconds,
        causes=Causes(**record.queue),
        load_seconds=record.load_seconds or None,
        ttft_seconds=record.ttft,
        end_to_end_seconds=record.seconds,
        decode_seconds=record.decode_seconds if has_tokens else None,
        longest_gap_seconds=record.longest_gap or None,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        finish_reason=record.finish_reason,
        preemptions=record.preemptions,
        timeline=[Moment(offset, state) for offset, state in record.timeline],
    )
