"""Figures of many replicas, summed as requests end: memory does not grow with their number."""

from dataclasses import dataclass, field

import numpy as np

from engine.simulation.figures import AdapterWait, Figures, Slo
from engine.simulation.intervals import Sighting
from engine.simulation.log_histogram import LogHistogram
from engine.simulation.record import SimulatedRequest
from engine.simulation.use import UseMeter

GAPS_AT_ONCE = 10_000


@dataclass(slots=True)
class AdapterTally:
    """One adapter's requests."""

    num_requests: int = 0
    ttft_seconds: float = 0.0
    longest_wait: float = 0.0
    queue: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by cause."""

    def merge(self, other: "AdapterTally") -> None:
        """Add what another part of the fleet saw."""
        self.num_requests += other.num_requests
        self.ttft_seconds += other.ttft_seconds
        self.longest_wait = max(self.longest_wait, other.longest_wait)
        add_seconds(self.queue, other.queue)


@dataclass(slots=True, kw_only=True)
class FleetFigures:
    """Sums over all requests but the first `num_warm_up` arrivals."""

    slo: Slo
    num_warm_up: int = 0
    service_seconds: float = 0.0
    num_requests: int = 0
    num_refused: int = 0
    num_good: int = 0
    num_output_tokens: int = 0
    first_arrival: float = float("inf")
    last_end: float = 0.0
    ttft: LogHistogram = field(default_factory=LogHistogram)
    tpot: LogHistogram = field(default_factory=LogHistogram)
    queue: LogHistogram = field(default_factory=LogHistogram)
    queue_seconds: dict[str, float] = field(default_factory=dict[str, float])
    adapters: dict[str, AdapterTally] = field(default_factory=dict[str, AdapterTally])
    tenants: dict[str, float] = field(default_factory=dict[str, float])
    """Tokens served: prompts, and outputs by their weight of 2."""
    replicas: dict[int, int] = field(default_factory=dict[int, int])
    """Output tokens by replica."""
    use: UseMeter = field(default_factory=UseMeter)
    num_preemptions: int = 0
    num_loads: int = 0
    num_installs: int = 0
    num_rows: int = 0
    sightings: list[Sighting] = field(default_factory=list[Sighting])
    """Alerts that the service would have raised about the replicas."""
    _gap: LogHistogram = field(default_factory=LogHistogram)
    _recent_gaps: list[float] = field(default_factory=list[float])
    """Gaps not counted yet: counting many at once costs a fraction."""

    @property
    def gap(self) -> LogHistogram:
        """Times between two tokens, over all requests."""
        self._count_gaps()
        return self._gap

    def take(self, replica: int, record: SimulatedRequest) -> None:
        """A request is over."""
        request = record.request
        if request.request_id < self.num_warm_up:
            return
        self.num_requests += 1
        self.first_arrival = min(self.first_arrival, record.arrival)
        times = record.token_times
        if not times or record.finished is None:
            self.num_refused += record.finish_reason == "refused"
            return
        self.last_end = max(self.last_end, record.finished)
        ttft = times[0] - record.arrival + self.service_seconds
        tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        waited = sum(record.queue.values())
        self.num_good += ttft <= self.slo.first_token and tpot <= self.slo.per_output_token
        self.ttft.add(ttft)
        self.tpot.add(tpot)
        self.queue.add(waited)
        self._recent_gaps += record.gaps
        if len(self._recent_gaps) > GAPS_AT_ONCE:
            self._count_gaps()
        self.num_output_tokens += record.num_output_tokens
        self.replicas[replica] = self.replicas.get(replica, 0) + record.num_output_tokens
        served = len(request.prompt_token_ids) + 2.0 * record.num_output_tokens
        self.tenants[request.tenant] = self.tenants.get(request.tenant, 0.0) + served
        add_seconds(self.queue_seconds, record.queue)
        if request.adapter is not None:
            tally = self.adapters.setdefault(request.adapter, AdapterTally())
            tally.num_requests += 1
            tally.ttft_seconds += ttft
            tally.longest_wait = max(tally.longest_wait, waited)
            add_seconds(tally.queue, record.queue)

    def merge(self, other: "FleetFigures") -> None:
        """Add another part of the fleet."""
        for name in (
            "num_requests", "num_refused", "num_good", "num_output_tokens", "num_preemptions",
            "num_loads", "num_installs", "num_rows",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_arrival = min(self.first_arrival, other.first_arrival)
        self.last_end = max(self.last_end, other.last_end)
        for name in ("ttft", "tpot", "gap", "queue", "use"):
            getattr(self, name).merge(getattr(other, name))
        self.sightings += other.sightings
        add_seconds(self.queue_seconds, other.queue_seconds)
        add_seconds(self.tenants, other.tenants)
        for adapter, tally in other.adapters.items():
            self.adapters.setdefault(adapter, AdapterTally()).merge(tally)
        for replica, tokens in other.replicas.items():
            self.replicas[replica] = self.replicas.get(replica, 0) + tokens

    def _count_gaps(self) -> None:
        self._gap.add_all(np.array(self._recent_gaps))
        self._recent_gaps.clear()

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last end; 0 if nothing was served."""
        return max(0.0, self.last_end - self.first_arrival)

    @property
    def output_tokens_per_second(self) -> float:
        """Of all replicas together."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Requests that meet the SLO, as a share of all."""
        return self.num_good / self.num_requests if self.num_requests else 0.0

    def as_figures(self, num_kv_blocks: int) -> Figures:
        """In the form of one replica's; rates are totals, and use is the mean of the replicas."""
        num = max(1, self.num_requests)
        return Figures(
            num_requests=self.num_requests,
            num_refused=self.num_refused,
            seconds=self.seconds,
            output_tokens_per_second=self.output_tokens_per_second,
            ttft_p50_ms=1e3 * self.ttft.quantile(0.5),
            ttft_p99_ms=1e3 * self.ttft.quantile(0.99),
            tpot_p50_ms=1e3 * self.tpot.quantile(0.5),
            tpot_p99_ms=1e3 * self.tpot.quantile(0.99),
            gap_p50_ms=1e3 * self.gap.quantile(0.5),
            gap_p99_ms=1e3 * self.gap.quantile(0.99),
            queue_p50_ms=1e3 * self.queue.quantile(0.5),
            queue_p99_ms=1e3 * self.queue.quantile(0.99),
            goodput=self.goodput,
            slot_efficiency=self.num_output_tokens / self.num_rows if self.num_rows else 0.0,
            num_preemptions=self.num_preemptions,
            num_loads=self.num_loads,
            num_installs=self.num_installs,
            queue_ms={cause: 1e3 * sum_ / num for cause, sum_ in self.queue_seconds.items()},
            longest_wait_ms=1e3 * self.queue.highest,
            kv_use=self.use.mean(self.use.kv_seconds) / num_kv_blocks,
            kv_peak=self.use.kv_peak / num_kv_blocks,
            slots_used=self.use.mean(self.use.slot_seconds),
            running=self.use.mean(self.use.running_seconds),
        )

    def adapter_waits(self, count: int = 20) -> tuple[AdapterWait, ...]:
        """The `count` adapters whose requests waited longest in all."""
        tallies = sorted(self.adapters.items(), key=lambda item: -sum(item[1].queue.values()))
        return tuple(
            AdapterWait(
                adapter=adapter,
                num_requests=tally.num_requests,
                ttft_p50_ms=None,
                ttft_p99_ms=None,
                longest_wait_ms=1e3 * tally.longest_wait,
                queue_ms={c: 1e3 * sum_ / tally.num_requests for c, sum_ in tally.queue.items()},
            )
            for adapter, tally in tallies[:count]
        )

    @property
    def jain(self) -> float:
        """Jain's index of the service that tenants got: 1 if all got the same, 1/n if one did."""
        return jain_index(list(self.tenants.values()))


def jain_index(values: list[float]) -> float:
    """(sum x)^2 / (n sum x^2): Jain, Chiu and Hawe, "A quantitative measure of fairness", 1984.

    >>> jain_index([1.0, 1.0, 1.0])
    1.0
    >>> jain_index([1.0, 0.0, 0.0, 0.0])
    0.25
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def add_seconds(totals: dict[str, float], more: dict[str, float]) -> None:
    """Add to each key."""
    for key, seconds in more.items():
        totals[key] = totals.get(key, 0.0) + seconds
