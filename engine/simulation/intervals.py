"""A simulated engine as the service's alerts see a real one: sums over consecutive intervals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from engine.simulation.driver import Simulation
from engine.simulation.record import RequestRecord, percentile
from engine.telemetry.alerts import (
    AdapterInterval,
    Finding,
    Interval,
    adapter_findings,
    engine_findings,
)

SAMPLES = 10
"""Looks at what runs and waits, in an interval."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was counted; the oldest interval first."""

    intervals: Sequence[Interval]
    adapters: Sequence[AdapterInterval]
    """Over all intervals together."""

    def findings(self) -> list[Finding]:
        """What is wrong with it, by the rules of the service."""
        return [*engine_findings(self.intervals), *adapter_findings(self.adapters)]


def observe(simulation: Simulation, seconds: float, count: int) -> Observed:
    """Go on for `count` intervals of so many simulated seconds."""
    begun = simulation.clock.now
    parts: list[Interval] = []
    for _ in range(count):
        parts.append(_interval(simulation, seconds))
    ended = [r for r in simulation.records.values() if _ended_in(r, begun, simulation.clock.now)]
    return Observed(parts, _adapters(ended, simulation.runner.installs))


def _interval(simulation: Simulation, seconds: float) -> Interval:
    begun, core = simulation.clock.now, simulation.core
    preemptions, steps = core.stats().preemptions, []
    for part in range(1, SAMPLES + 1):
        simulation.advance(begun + seconds * part / SAMPLES)
        steps.append(core.stats())
    now = simulation.clock.now
    ended = [r for r in simulation.records.values() if _ended_in(r, begun, now)]
    times = [(r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1)
             for r in ended if len(r.token_times) > 1]  # fmt: skip
    gaps = [max(r.gaps) for r in ended if r.gaps]
    tokens = [at for r in simulation.records.values() for at in r.token_times if begun < at <= now]
    return Interval(
        seconds=now - begun,
        requests=len(ended),
        output_tokens=len(tokens),
        preemptions=steps[-1].preemptions - preemptions,
        running=fmean(stats.running for stats in steps),
        waiting=fmean(stats.waiting for stats in steps),
        kv_share=fmean(stats.kv_blocks_used / stats.kv_blocks_total for stats in steps),
        token_time_p50=median(times) if times else None,
        token_gap_p95=percentile(gaps, 95) if gaps else None,
        prefill_tokens=sum(len(r.request.prompt_token_ids) for r in ended),
    )


def _adapters(ended: Sequence[RequestRecord], installs: Counter[str]) -> list[AdapterInterval]:
    by_adapter: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in ended:
        if record.request.adapter is not None:
            key = record.request.tenant, record.request.adapter
            by_adapter.setdefault(key, []).append(record)
    found: list[AdapterInterval] = []
    for (tenant, adapter), records in by_adapter.items():
        queue = Counter[str]()
        for record in records:
            queue.update(record.queue)
        reasons = Counter(record.finish_reason for record in records)
        found.append(
            AdapterInterval(
                tenant=tenant, adapter=adapter, requests=len(records), stop=reasons["stop"],
                length=reasons["length"], queue=dict(queue), loads=installs[adapter],
                queue_p95=percentile([sum(r.queue.values()) for r in records], 95),
            )
        )  # fmt: skip
    return found


def _ended_in(record: RequestRecord, begun: float, now: float) -> bool:
    return record.finished is not None and begun < record.finished <= now
