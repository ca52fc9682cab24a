"""When versions began to answer, from the audit log, and how replies ended before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.model_ref import DEFAULT_ALIAS
from adapter_store.registry.models import Audit
from adapter_store.registry.rollup_models import TrafficRollup, TrafficSubject
from engine.telemetry.alerts import judge_publish
from loraplex.dashboard.adapter_views import Publish
from loraplex.dashboard.views import Finishes
from loraplex.dashboard.windows import finishes_of
from loraplex.recorder.rows import TRAFFIC_SUMS, sums_of
from loraplex.recorder.traffic import Traffic, sum_of
from loraplex.recorder.widths import QUARTER, bucket

MAX_PUBLISHES = 10


@dataclass(frozen=True, slots=True)
class Move:
    """The alias `default` went from one version to another."""

    at: float
    version: int
    previous: int | None


async def publishes(session: AsyncSession, tenant: str, adapter: str) -> list[Publish]:
    """The newest publishes, newest first: two statements."""
    moves = await _moves(session, tenant, adapter)
    versions = {v for move in moves for v in (move.version, move.previous) if v is not None}
    endings = await _endings(session, tenant, adapter, versions)
    return [_publish(move, endings) for move in moves]


async def _moves(session: AsyncSession, tenant: str, adapter: str) -> list[Move]:
    entries = await session.scalars(
        select(Audit)
        .where(
            Audit.tenant == tenant,
            Audit.subject == f"{adapter}:{DEFAULT_ALIAS}",
            Audit.action == "alias.set",
        )
        .order_by(Audit.id.desc())
        .limit(4 * MAX_PUBLISHES)
    )
    moves = [
        Move(entry.created_at.timestamp(), entry.detail["version"], entry.detail["previous"])
        for entry in entries
        if entry.detail["version"] != entry.detail["previous"]  # else only a canary's share moved
    ]
    return moves[:MAX_PUBLISHES]


async def _endings(
    session: AsyncSession, tenant: str, adapter: str, versions: set[int]
) -> Mapping[int, Sequence[tuple[int, Traffic]]]:
    """Sums by version and quarter of an hour, as far back as they are kept."""
    rows = await session.execute(
        select(TrafficSubject.version, TrafficRollup.start, *TRAFFIC_SUMS)
        .join(TrafficRollup, TrafficRollup.subject_id == TrafficSubject.id)
        .where(
            TrafficSubject.tenant == tenant,
            TrafficSubject.adapter == adapter,
            TrafficSubject.version.in_(versions),
            TrafficRollup.width == QUARTER,
        )
        .order_by(TrafficRollup.start)
    )
    found: dict[int, list[tuple[int, Traffic]]] = {}
    for row in rows:
        found.setdefault(row.version, []).append((row.start, sums_of(row)))
    return found


def _publish(move: Move, endings: Mapping[int, Sequence[tuple[int, Traffic]]]) -> Publish:
    """A bucket in which the alias moved counts for both: each has its own version's endings."""
    moved = bucket(move.at, QUARTER)
    after = sum_of(part for start, part in endings.get(move.version, ()) if start >= moved)
    before = Traffic()
    if move.previous is not None:
        before = sum_of(part for start, part in endings.get(move.previous, ()) if start <= moved)
    return Publish(
        at=move.at,
        version=move.version,
        previous=move.previous,
        before=_free_endings(before),
        after=_free_endings(after),
        before_length_share=_length_share(before),
        after_length_share=_length_share(after),
        verdict=judge_publish(
            (before.stop, before.cut) if move.previous is not None else None,
            (after.stop, after.cut),
        ),
    )


def _free_endings(traffic: Traffic) -> Finishes:
    return replace(finishes_of(traffic), length=traffic.cut)


def _length_share(traffic: Traffic) -> float | None:
    ended = traffic.stop + traffic.cut
    return traffic.cut / ended if ended else None
