"""Between rows of the roll-ups and what they hold."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from adapter_store.registry.rollup_models import EngineRollup, SlotSpan, TrafficRollup
from engine.telemetry.records import AdapterOwner
from loraplex.recorder.engine_bucket import ENGINE_SUMS, EngineBucket
from loraplex.recorder.slot_book import Stay
from loraplex.recorder.traffic import Traffic

_SUMS = tuple(f.name for f in fields(Traffic) if f.name not in ("refused", "sketches"))
TRAFFIC_COLUMNS = tuple(getattr(TrafficRollup, name) for name in (*_SUMS, "refused", "sketches"))
TRAFFIC_SUMS = tuple(getattr(TrafficRollup, name) for name in _SUMS)
"""Without the distributions, which are most of a row."""
ENGINE_COLUMNS = tuple(getattr(EngineRollup, name) for name in ("start", *ENGINE_SUMS, "sketches"))


def traffic_of(row: Sequence[Any]) -> Traffic:
    """What a row holds whose last columns are `TRAFFIC_COLUMNS`."""
    *sums, refused, sketches = row[-len(TRAFFIC_COLUMNS) :]
    traffic = Traffic(*sums)
    if refused:
        traffic.refused = dict(refused)
    traffic.merge_packed(sketches)
    return traffic


def sums_of(row: Sequence[Any]) -> Traffic:
    """What a row holds whose last columns are `TRAFFIC_SUMS`."""
    return Traffic(*row[-len(TRAFFIC_SUMS) :])


def traffic_values(traffic: Traffic) -> dict[str, Any]:
    """The columns of its row, the key left out."""
    values: dict[str, Any] = {name: getattr(traffic, name) for name in _SUMS}
    return {**values, "refused": traffic.refused, "sketches": traffic.pack_sketches()}


def engine_of(row: Any) -> EngineBucket:
    """What a row with `ENGINE_COLUMNS` holds."""
    values = row._mapping
    found = EngineBucket(**{name: values[name] for name in ENGINE_SUMS})
    found.merge_packed(values["sketches"])
    return found


def engine_values(part: EngineBucket) -> dict[str, Any]:
    """The columns of its row, the key left out."""
    values: dict[str, Any] = {name: getattr(part, name) for name in ENGINE_SUMS}
    return {**values, "sketches": part.pack_sketches()}


def stay_of(row: SlotSpan) -> Stay:
    """What a row holds."""
    owners = tuple(AdapterOwner(tenant, label) for tenant, label in row.owners)
    return Stay(row.slot, row.kind, row.digest, owners, row.began, row.ended)  # type: ignore[arg-type]


def stay_values(stay: Stay) -> dict[str, Any]:
    """The columns of its row."""
    return {
        "slot": stay.slot,
        "kind": stay.kind,
        "digest": stay.digest,
        "owners": [[owner.tenant, owner.label] for owner in stay.owners],
        "began": stay.began,
        "ended": stay.ended,
    }
