"""One row an adapter and window, so that a table of thousands is sorted and paged by the database.

A row is computed from the adapter's buckets when it had traffic since it was written, or when a
bucket of its own has left the window; nothing of it is kept in memory.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import delete, insert, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.rollup_models import AdapterStanding, TrafficRollup, TrafficSubject
from adapter_store.registry.session import Database
from loraplex.recorder.rows import TRAFFIC_COLUMNS, traffic_of
from loraplex.recorder.sketch import Sketch
from loraplex.recorder.traffic import CAUSES, FINISHES, Subject, Traffic, sum_of
from loraplex.recorder.widths import SPANS, Range, Span, first_bucket

MAX_SPARKS = 30
_CHUNK = 100
"""Adapters that are computed between two looks at the event loop."""

Name = tuple[str, str]
"""Tenant and adapter."""


class Standings:
    """Keeps the rows of all windows. Methods raise `RegistryUnavailable`."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._touched: dict[Range, set[Name]] = {range_: set() for range_ in SPANS}
        self._begins: dict[Range, int | None] = dict.fromkeys(SPANS)
        """Of each window, as of its last refresh; None: there was none."""

    def touch(self, versions: Iterable[Subject]) -> None:
        """There is new traffic of these."""
        names = {(version.tenant, version.adapter) for version in versions if version.adapter}
        for touched in self._touched.values():
            touched |= names

    async def refresh(self, range_: Range) -> int:
        """Bring a window's rows up to date; returns how many were computed."""
        span, now = SPANS[range_], self._clock()
        begin, before = first_bucket(span, now), self._begins[range_]
        touched, self._touched[range_] = self._touched[range_], set()
        try:
            if before is None:
                names = await self._database.read(lambda s: _all_names(s, span, begin))
            else:
                left = await self._database.read(lambda s: _names_in(s, span, before, begin))
                names = touched | left
            ordered = sorted(names)
            for first in range(0, len(ordered), _CHUNK):
                await self._compute(span, begin, now, ordered[first : first + _CHUNK])
        except BaseException:
            self._touched[range_] |= touched
            raise
        self._begins[range_] = begin
        return len(ordered)

    async def _compute(self, span: Span, begin: int, now: float, names: list[Name]) -> None:
        buckets = await self._database.read(lambda s: buckets_of(s, span, begin, names))
        rows = [
            {"span": span.seconds, "tenant": tenant, "adapter": adapter, **values}
            for (tenant, adapter), parts in buckets.items()
            if (values := standing_of(span, begin, now, parts)) is not None
        ]
        await self._database.write(lambda s: _replace(s, span, names, rows))


def standing_of(
    span: Span, begin: int, now: float, parts: Mapping[int, Traffic]
) -> dict[str, Any] | None:
    """The columns of an adapter's row, from its buckets by their start; None without traffic."""
    total = sum_of(parts.values())
    if not (total.requests or total.decode_tokens or total.resident_seconds or total.refused):
        return None
    queue, load = total.quantiles("queue"), total.quantiles("load_time")
    ttft = total.quantiles("ttft")
    token_time, gap = total.quantiles("token_time"), total.quantiles("token_gap")
    ended = total.stop + total.length  # by themselves: the share that the page shows
    sparks = _sparks(span, begin, parts)
    return {
        "requests": total.requests,
        "output_tokens": total.output_tokens,
        "queue_p50": queue[0],
        "queue_p95": queue[1],
        "queue_p99": queue[2],
        "queue_seconds": total.queue_seconds,
        "load_p95": load[1],
        "ttft_p95": ttft[1],
        "token_time_p95": token_time[1],
        "token_gap_p95": gap[1],
        "length_share": total.length / ended if ended else None,
        "resident_share": min(1.0, total.resident_seconds / max(now - begin, 1.0)),
        "last_request": total.last_request or None,
        "figures": {
            "prompt_tokens": total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "preemptions": total.preemptions,
            "loads": total.loads,
            "causes": {cause: getattr(total, cause) for cause in CAUSES},
            "finishes": {reason: getattr(total, reason) for reason in FINISHES},
            "cut": total.cut,
            "load": load,
            "ttft": ttft,
            "token_time": token_time,
            "token_gap": gap,
            "spark_requests": [requests for requests, _ in sparks],
            "spark_queue": [queue.quantiles(0.95)[0] for _, queue in sparks],
        },
    }


def _sparks(span: Span, begin: int, parts: Mapping[int, Traffic]) -> list[tuple[int, Sketch]]:
    """Requests and their queue time in up to `MAX_SPARKS` equal parts of the window."""
    num_buckets = span.seconds // span.width
    each = math.ceil(num_buckets / MAX_SPARKS) * span.width
    requests = [0] * (span.seconds // each)
    queues = [Sketch() for _ in requests]
    for start, part in parts.items():
        number = (start - begin) // each
        requests[number] += part.requests
        if (queue := part.sketches.get("queue")) is not None:
            queues[number].merge(queue)
    return list(zip(requests, queues, strict=True))


async def buckets_of(
    session: AsyncSession, span: Span, begin: int, names: Collection[Name]
) -> dict[Name, dict[int, Traffic]]:
    """Adapters' buckets from `begin` on, by their start, all versions together."""
    rows = await session.execute(
        select(TrafficSubject.tenant, TrafficSubject.adapter, TrafficRollup.start, *TRAFFIC_COLUMNS)
        .join(TrafficRollup, TrafficRollup.subject_id == TrafficSubject.id)
        .where(
            tuple_(TrafficSubject.tenant, TrafficSubject.adapter).in_(names),
            TrafficRollup.width == span.width,
            TrafficRollup.start >= begin,
            TrafficRollup.start < begin + span.seconds,
        )
    )
    found: dict[Name, dict[int, Traffic]] = {}
    for row in rows:
        of_name = found.setdefault((row.tenant, row.adapter), {})
        if (known := of_name.get(row.start)) is None:
            of_name[row.start] = traffic_of(row)
        else:
            known.merge(traffic_of(row))
    return found


async def _all_names(session: AsyncSession, span: Span, begin: int) -> set[Name]:
    standing = await session.execute(
        select(AdapterStanding.tenant, AdapterStanding.adapter).where(
            AdapterStanding.span == span.seconds
        )
    )
    known = {(row.tenant, row.adapter) for row in standing}
    return known | await _names_in(session, span, begin, begin + span.seconds)


async def _names_in(session: AsyncSession, span: Span, since: int, until: int) -> set[Name]:
    """Adapters with a bucket that began in a stretch."""
    rows = await session.execute(
        select(TrafficSubject.tenant, TrafficSubject.adapter)
        .distinct()
        .join(TrafficRollup, TrafficRollup.subject_id == TrafficSubject.id)
        .where(
            TrafficRollup.width == span.width,
            TrafficRollup.start >= since,
            TrafficRollup.start < until,
            TrafficSubject.adapter != "",
        )
    )
    return {(row.tenant, row.adapter) for row in rows}


async def _replace(
    session: AsyncSession, span: Span, names: list[Name], rows: list[dict[str, Any]]
) -> None:
    await session.execute(
        delete(AdapterStanding).where(
            AdapterStanding.span == span.seconds,
            tuple_(AdapterStanding.tenant, AdapterStanding.adapter).in_(names),
        )
    )
    if rows:
        await session.execute(insert(AdapterStanding), rows)
