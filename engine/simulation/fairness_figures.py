"""How evenly an engine served its tenants, from a simulation's records."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.simulation.fleet_figures import jain_index
from engine.simulation.record import SimulatedRequest

OUTPUT_WEIGHT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Over an interval. Service is in prompt tokens, output tokens counting 2."""

    num_backlogged: int
    """Tenants of whom somebody waited throughout the interval: their service should be equal."""
    num_unserved: int
    """Those of them who got nothing at all."""
    jain: float
    """Jain's index of the service of these; 1 if all got the same, be it nothing, or none is."""
    service_difference: float
    """The largest between two of these."""
    longest_wait: float
    """Seconds from arrival to first token, of any request that came in the interval."""
    longest_light_wait: float
    """The same of tenants who asked for less than an equal share: they should hardly wait."""


def fairness(records: Sequence[SimulatedRequest], begin: float, end: float) -> Fairness:
    """Of the records of a whole run, over `begin .. end` seconds of it."""
    by_tenant: dict[str, list[SimulatedRequest]] = {}
    for record in records:
        by_tenant.setdefault(record.request.tenant, []).append(record)
    service = {tenant: _service(found, begin, end) for tenant, found in by_tenant.items()}
    backlogged = [t for t, found in by_tenant.items() if _waits_throughout(found, begin, end)]
    got = [service[tenant] for tenant in backlogged]
    share = sum(service.values()) / len(service) if service else 0.0
    light = {t for t, found in by_tenant.items() if _asked(found, begin, end) < share}
    came = [record for record in records if begin <= record.arrival < end]
    return Fairness(
        num_backlogged=len(backlogged),
        num_unserved=got.count(0.0),
        jain=jain_index(got),
        service_difference=max(got, default=0.0) - min(got, default=0.0),
        longest_wait=max((_wait(r) for r in came), default=0.0),
        longest_light_wait=max((_wait(r) for r in came if r.request.tenant in light), default=0.0),
    )


def _wait(record: SimulatedRequest) -> float:
    return 0.0 if record.time_to_first_token is None else record.time_to_first_token


def _service(records: Sequence[SimulatedRequest], begin: float, end: float) -> float:
    outputs = sum(begin <= at < end for record in records for at in record.token_times)
    prompts = sum(
        len(record.request.prompt_token_ids)
        for record in records
        if record.first_admitted is not None and begin <= record.first_admitted < end
    )
    return prompts + OUTPUT_WEIGHT * outputs


def _asked(records: Sequence[SimulatedRequest], begin: float, end: float) -> float:
    return sum(
        len(r.request.prompt_token_ids) + OUTPUT_WEIGHT * r.request.sampling.max_tokens
        for r in records
        if begin <= r.arrival < end
    )


def _waits_throughout(records: Sequence[SimulatedRequest], begin: float, end: float) -> bool:
    """Whether somebody waits at every moment, the moments between two steps left out."""
    covered = begin
    for record in sorted(records, key=lambda record: record.arrival):
        if record.arrival > covered:
            return False
        admitted = end if record.first_admitted is None else record.first_admitted
        covered = max(covered, admitted)
        if covered >= end:
            return True
    return False
