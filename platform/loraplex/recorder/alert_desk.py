"""Looks for failure modes in the newest minutes, and keeps when each began and ended."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.model_ref import DEFAULT_ALIAS
from adapter_store.registry.models import Audit
from adapter_store.registry.rollup_models import (
    AdapterStanding,
    AlertRow,
    EngineRollup,
    TrafficRollup,
    TrafficSubject,
)
from adapter_store.registry.session import Database
from engine.telemetry.alerts import (
    AdapterInterval,
    Figure,
    Finding,
    Interval,
    Limits,
    adapter_findings,
    engine_findings,
    judge_publish,
)
from loraplex.recorder.engine_bucket import EngineBucket
from loraplex.recorder.recorder import SILENT_SECONDS
from loraplex.recorder.rows import ENGINE_COLUMNS, TRAFFIC_COLUMNS, engine_of, traffic_of
from loraplex.recorder.traffic import Traffic
from loraplex.recorder.widths import MINUTE, QUARTER, SPANS, bucket

MINUTES = 5
CALM_SECONDS = 45.0
"""What is not found for so long has ended."""
PUBLISH_SECONDS = 86_400
PUBLISH_EVIDENCE_SECONDS = 3600
"""Endings of a new version count for so long: an alert outlives its traffic by no more."""
MAX_ALERTS = 100
_MAX_PUBLISHES, _MAX_AUDITED = 200, 5000
_LIMITS = Limits()


class AlertKey(NamedTuple):
    """What an alert is about."""

    kind: str
    tenant: str | None
    adapter: str | None
    version: int | None


class _Found(NamedTuple):
    severity: str
    what: str
    change: str
    figures: Sequence[Figure]


class AlertDesk:
    """`look` now and then; raises `RegistryUnavailable`."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._seen: dict[AlertKey, float] = {}

    async def look(self, heard_at: float) -> None:
        """Find what is wrong now; `heard_at` is when the engine last answered, 0: never."""
        now = self._clock()
        found = await self._database.read(lambda s: _find_all(s, now))
        if heard_at and now - heard_at > SILENT_SECONDS:
            found[AlertKey("engine_down", None, None, None)] = _engine_down(now - heard_at)
        kept = dict(list(found.items())[:MAX_ALERTS])
        self._seen |= dict.fromkeys(kept, now)
        await self._database.write(lambda s: self._write(s, kept, now))

    async def _write(
        self, session: AsyncSession, found: dict[AlertKey, _Found], now: float
    ) -> None:
        rows = await session.scalars(select(AlertRow).where(AlertRow.ended.is_(None)))
        lasting = {AlertKey(r.kind, r.tenant, r.adapter, r.version): r for r in rows}
        for key, row in lasting.items():
            seen = self._seen.setdefault(key, now)
            if key not in found and now - seen >= CALM_SECONDS:
                row.ended = seen
                del self._seen[key]
        for key, finding in found.items():
            row = lasting.get(key)
            if row is None:
                row = AlertRow(**key._asdict(), began=now, ended=None)
                session.add(row)
            row.severity, row.what, row.change = finding.severity, finding.what, finding.change
            row.figures = [[f.name, f.value, f.unit, f.limit] for f in finding.figures]
        await session.flush()


async def _find_all(session: AsyncSession, now: float) -> dict[AlertKey, _Found]:
    """The engine's first, then adapters'; the most important ones of many come first."""
    minutes = await _minutes(session, now)
    findings: list[Finding] = [
        *engine_findings([_interval(engine, traffic) for engine, traffic in minutes]),
        *await _publish_findings(session, now),
        *adapter_findings(await _adapters(session)),
    ]
    found = {
        AlertKey(f.kind, f.tenant, f.adapter, f.version): _Found(
            f.severity, f.what, f.change, f.figures
        )
        for f in findings
    }
    missed = sum(engine.missed for engine, _ in minutes)
    if missed:
        found[AlertKey("records_missed", None, None, None)] = _records_missed(missed)
    return found


async def _minutes(session: AsyncSession, now: float) -> list[tuple[EngineBucket, Traffic]]:
    """The newest minutes that the engine was watched in, the oldest first."""
    since = bucket(now, MINUTE) - MINUTES * MINUTE
    engine = await session.execute(
        select(*ENGINE_COLUMNS)
        .where(EngineRollup.width == MINUTE, EngineRollup.start >= since)
        .order_by(EngineRollup.start)
    )
    traffic = await session.execute(
        select(TrafficRollup.start, *TRAFFIC_COLUMNS)
        .join(TrafficSubject, TrafficSubject.id == TrafficRollup.subject_id)
        .where(
            TrafficSubject.tenant == "", TrafficSubject.adapter == "", TrafficSubject.version == 0,
            TrafficRollup.width == MINUTE, TrafficRollup.start >= since,
        )
    )  # fmt: skip
    by_start = {row.start: traffic_of(row) for row in traffic}
    return [
        (part, by_start.get(row.start, Traffic()))
        for row in engine
        if (part := engine_of(row)).covered
    ]


def _interval(engine: EngineBucket, traffic: Traffic) -> Interval:
    return Interval(
        seconds=engine.covered,
        requests=traffic.requests,
        output_tokens=engine.decode_tokens,
        preemptions=engine.preemptions,
        running=engine.mean("running") or 0.0,
        waiting=engine.mean("waiting") or 0.0,
        kv_share=engine.mean("kv_share") or 0.0,
        token_time_p50=traffic.quantiles("token_time")[0],
        token_gap_p95=traffic.quantiles("token_gap")[1],
        prefill_tokens=engine.prefill_tokens,
    )


async def _adapters(session: AsyncSession) -> list[AdapterInterval]:
    """Adapters with enough requests in the newest minutes to be judged, the busiest first."""
    rows = await session.scalars(
        select(AdapterStanding)
        .where(
            AdapterStanding.span == SPANS["5m"].seconds,
            AdapterStanding.requests >= _LIMITS.min_requests,
        )
        .order_by(AdapterStanding.requests.desc())
    )
    return [
        AdapterInterval(
            tenant=row.tenant,
            adapter=row.adapter,
            requests=row.requests,
            stop=row.figures["finishes"]["stop"],
            length=row.figures.get("cut", 0),  # a row of an older release has none
            queue=row.figures["causes"],
            queue_p95=row.queue_p95,
            loads=row.figures["loads"],
        )
        for row in rows
    ]


async def _publish_findings(session: AsyncSession, now: float) -> list[Finding]:
    """Versions that began to answer within a day, and never stop."""
    newest = select(func.max(Audit.id)).scalar_subquery()
    entries = await session.scalars(
        select(Audit)
        .where(Audit.id > newest - _MAX_AUDITED, Audit.action == "alias.set")
        .order_by(Audit.id.desc())
        .limit(_MAX_PUBLISHES)
    )
    moved: dict[tuple[str, str], tuple[int, int | None]] = {}
    for entry in entries:
        name, _, alias = entry.subject.rpartition(":")
        if alias == DEFAULT_ALIAS and now - entry.created_at.timestamp() <= PUBLISH_SECONDS:
            key = entry.tenant or "", name
            moved.setdefault(key, (entry.detail["version"], entry.detail["previous"]))
    wanted = {
        (tenant, name, version)
        for (tenant, name), versions in moved.items()
        for version in versions
        if version is not None
    }
    ever = await endings_of(session, wanted, QUARTER, 0)
    lately = await endings_of(
        session, wanted, MINUTE, bucket(now, MINUTE) - PUBLISH_EVIDENCE_SECONDS
    )
    found: list[Finding] = []
    for (tenant, name), (version, previous) in moved.items():
        after = lately.get((tenant, name, version), (0, 0))
        before = ever.get((tenant, name, previous)) if previous is not None else None
        if judge_publish(before, after) == "never_stops":
            found.append(_never_stops(tenant, name, version, before, after))
    return found


async def endings_of(
    session: AsyncSession, versions: Iterable[tuple[str, str, int]], width: int, since: int
) -> dict[tuple[str, str, int], tuple[int, int]]:
    """(ended by stop, ended by length) of versions, in the buckets of a width since then.

    Without the requests that had to run until their limit, for they asked for it.
    """
    key = tuple_(TrafficSubject.tenant, TrafficSubject.adapter, TrafficSubject.version)
    rows = await session.execute(
        select(
            TrafficSubject.tenant, TrafficSubject.adapter, TrafficSubject.version,
            func.sum(TrafficRollup.stop).label("stopped"),
            func.sum(TrafficRollup.length - TrafficRollup.length_asked).label("cut"),
        )
        .join(TrafficRollup, TrafficRollup.subject_id == TrafficSubject.id)
        .where(
            key.in_(list(versions)), TrafficRollup.width == width, TrafficRollup.start >= since
        )
        .group_by(TrafficSubject.tenant, TrafficSubject.adapter, TrafficSubject.version)
    )  # fmt: skip
    return {
        (row.tenant, row.adapter, row.version): (int(row.stopped), int(row.cut)) for row in rows
    }


def _never_stops(
    tenant: str, name: str, version: int, before: tuple[int, int] | None, after: tuple[int, int]
) -> Finding:
    share = after[1] / sum(after)
    figures = [Figure("ended by length in the last hour", share, "share")]
    was = ""
    if before is not None and sum(before):
        share = before[1] / sum(before)
        figures.append(Figure("ended by length with the version before", share, "share"))
        was = f", and {before[1]} of {sum(before)} of the version before"
    return Finding(
        kind="never_stops",
        severity="critical",
        what=f"In the last hour {after[1]} of {sum(after)} replies of version {version}, published "
        f"within a day, ran until their limit{was}: it does not emit its end token.",
        change="Point the alias back to the version before, then train with the end-of-sequence "
        "token in the targets, or set stop tokens with the version.",
        figures=tuple(figures),
        tenant=tenant,
        adapter=name,
        version=version,
    )


def _engine_down(seconds: float) -> _Found:
    return _Found(
        "critical",
        f"The engine has not answered for {seconds:.0f} s.",
        "Look at the engine's log; the supervisor starts a new one as soon as it has ended.",
        [Figure("silent for", seconds, "s", SILENT_SECONDS)],
    )


def _records_missed(missed: int) -> _Found:
    return _Found(
        "warning",
        f"{missed} records of the engine were overwritten before the recorder read them.",
        "See whether the database or the machine is too slow; figures of these minutes are low.",
        [Figure("records", missed, "count")],
    )
