"""The figures of a simulated run that operators plan with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.simulation.record import SimulatedRequest, SimulationReport


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as good; seconds."""

    first_token: float = 0.5
    per_output_token: float = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures over the requests after the warm-up. A percentile of nothing is 0."""

    num_requests: int
    num_refused: int
    seconds: float
    """Seconds from their first arrival to their last end."""
    output_tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    """Time per output token of a request, after its first."""
    tpot_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    """Milliseconds between two tokens, over all requests."""
    queue_p50_ms: float
    queue_p99_ms: float
    goodput: float
    """Requests that meet the SLO, as a share of all."""
    slot_efficiency: float
    """Tokens of outputs as a share of the rows that could have drawn one; over the whole run."""
    num_preemptions: int
    num_loads: int
    """Adapters brought to host memory; `num_installs`: put into a slot."""
    num_installs: int
    queue_ms: dict[str, float]
    """Mean milliseconds in the queue by cause."""
    longest_wait_ms: float
    """The longest time in the queue, of any request."""
    kv_use: float
    """Mean share of the KV blocks in use while steps ran; `kv_peak` is the largest."""
    kv_peak: float
    slots_used: float
    """Mean number of adapter slots in use while steps ran."""
    running: float
    """Mean number of sequences that ran while steps ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWait:
    """One adapter's requests: how many, and where they waited."""

    adapter: str
    num_requests: int
    ttft_p50_ms: float | None
    """None, like the next one, for a fleet, which keeps no times by adapter."""
    ttft_p99_ms: float | None
    longest_wait_ms: float
    queue_ms: dict[str, float]
    """Mean milliseconds in the queue by cause."""


def figures(
    report: SimulationReport,
    slo: Slo,
    warm_up: float = 0.1,
    service_seconds: float = 0.0,
    num_kv_blocks: int = 1,
) -> Figures:
    """`warm_up`: this share of the requests, the first to arrive, is discarded.

    `service_seconds` are added to each time to first token: what it takes besides the engine.
    """
    records = report.requests[int(len(report.requests) * warm_up) :]
    served = [record for record in records if record.token_times]
    ttft = np.array([r.token_times[0] - r.arrival + service_seconds for r in served])
    tpot = np.array([_per_token(record) for record in served])
    gaps = [np.diff(record.token_times) for record in served]
    queue = [sum(record.queue.values()) for record in served]
    num_tokens = sum(record.num_output_tokens for record in served)
    ends = [record.finished for record in served if record.finished is not None]
    seconds = max(ends, default=0.0) - min((record.arrival for record in records), default=0.0)
    use = report.use
    num_good = int(np.sum((ttft <= slo.first_token) & (tpot <= slo.per_output_token)))
    return Figures(
        num_requests=len(records),
        num_refused=sum(record.finish_reason == "refused" for record in records),
        seconds=max(seconds, 0.0),
        output_tokens_per_second=num_tokens / seconds if seconds > 0 else 0.0,
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        tpot_p50_ms=_percentile(tpot, 50),
        tpot_p99_ms=_percentile(tpot, 99),
        gap_p50_ms=_percentile(np.concatenate(gaps) if gaps else np.empty(0), 50),
        gap_p99_ms=_percentile(np.concatenate(gaps) if gaps else np.empty(0), 99),
        queue_p50_ms=_percentile(np.array(queue), 50),
        queue_p99_ms=_percentile(np.array(queue), 99),
        goodput=num_good / len(records) if records else 0.0,
        slot_efficiency=report.num_output_tokens / report.num_rows if report.num_rows else 0.0,
        num_preemptions=report.num_preemptions,
        num_loads=report.num_loads,
        num_installs=report.num_installs,
        queue_ms=_mean_by_cause(served),
        longest_wait_ms=max(queue, default=0.0) * 1e3,
        kv_use=use.mean(use.kv_seconds) / num_kv_blocks,
        kv_peak=use.kv_peak / num_kv_blocks,
        slots_used=use.mean(use.slot_seconds),
        running=use.mean(use.running_seconds),
    )


def adapter_waits(
    report: SimulationReport, warm_up: float = 0.1, count: int = 20
) -> tuple[AdapterWait, ...]:
    """The `count` adapters whose requests waited longest in all."""
    by_adapter: dict[str, list[SimulatedRequest]] = {}
    for record in report.requests[int(len(report.requests) * warm_up) :]:
        if record.request.adapter is not None and record.token_times:
            by_adapter.setdefault(record.request.adapter, []).append(record)
    waited = {
        adapter: sum(sum(record.queue.values()) for record in records)
        for adapter, records in by_adapter.items()
    }
    return tuple(
        _adapter_wait(adapter, by_adapter[adapter])
        for adapter in sorted(waited, key=lambda adapter: -waited[adapter])[:count]
    )


def _adapter_wait(adapter: str, records: Sequence[SimulatedRequest]) -> AdapterWait:
    ttft = np.array([record.token_times[0] - record.arrival for record in records])
    return AdapterWait(
        adapter=adapter,
        num_requests=len(records),
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        longest_wait_ms=max(sum(record.queue.values()) for record in records) * 1e3,
        queue_ms=_mean_by_cause(records),
    )


def _mean_by_cause(records: Sequence[SimulatedRequest]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for record in records:
        for cause, seconds in record.queue.items():
            totals[cause] = totals.get(cause, 0.0) + seconds * 1e3 / len(records)
    return totals


def _per_token(record: SimulatedRequest) -> float:
    times = record.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def _percentile(seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]", percent: float) -> float:
    """In milliseconds."""
    return float(np.percentile(seconds, percent)) * 1e3 if len(seconds) else 0.0
