"""A simulated engine as the service's alerts see a real one: sums over consecutive intervals."""

import math
from collections import Counter
from dataclasses import dataclass, field

from engine.engine_stats import EngineStats
from engine.simulation.driver import Simulation
from engine.simulation.log_histogram import LogHistogram
from engine.simulation.record import SimulatedRequest
from engine.telemetry.alerts import (
    AdapterInterval,
    Finding,
    Interval,
    adapter_findings,
    engine_findings,
)

NUM_INTERVALS = 4
SAMPLES = 10
"""Looks at what runs and waits, in an interval."""
ENDS_BY_ITSELF = math.inf


@dataclass(frozen=True, slots=True)
class Sighting:
    """What an alert of the service says of a simulated engine."""

    finding: Finding
    replica: int = 0


@dataclass(slots=True)
class _Part:
    """The interval that is counted."""

    begun: float
    before: EngineStats
    requests: int = 0
    prefill_tokens: int = 0
    running: int = 0
    """Sums over the samples; so with the next two."""
    waiting: int = 0
    kv_blocks: int = 0
    token_time: LogHistogram = field(default_factory=LogHistogram)
    gap: LogHistogram = field(default_factory=LogHistogram)

    def take(self, record: SimulatedRequest) -> None:
        self.requests += 1
        self.prefill_tokens += len(record.request.prompt_token_ids)
        times = record.token_times
        if len(times) > 1:
            self.token_time.add((times[-1] - times[0]) / (len(times) - 1))
            self.gap.add(max(record.gaps))

    def sample(self, stats: EngineStats) -> None:
        self.running += stats.running
        self.waiting += stats.waiting
        self.kv_blocks += stats.kv_blocks_used

    def close(self, now: float, stats: EngineStats) -> Interval:
        has_tokens = self.token_time.count > 0
        return Interval(
            seconds=now - self.begun,
            requests=self.requests,
            output_tokens=stats.output_tokens - self.before.output_tokens,
            preemptions=stats.preemptions - self.before.preemptions,
            running=self.running / SAMPLES,
            waiting=self.waiting / SAMPLES,
            kv_share=self.kv_blocks / SAMPLES / stats.kv_blocks_total,
            token_time_p50=self.token_time.quantile(0.5) if has_tokens else None,
            token_gap_p95=self.gap.quantile(0.95) if has_tokens else None,
            prefill_tokens=self.prefill_tokens,
        )


@dataclass(slots=True)
class _Adapter:
    requests: int = 0
    stop: int = 0
    length: int = 0
    queue: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by cause."""

    def take(self, record: SimulatedRequest, reply_limit: float) -> None:
        self.requests += 1
        for cause, seconds in record.queue.items():
            self.queue[cause] = self.queue.get(cause, 0.0) + seconds
        asked = record.request.sampling.max_tokens
        is_whole = record.num_output_tokens == asked < reply_limit
        self.stop += record.finish_reason == "stop" or is_whole
        self.length += record.finish_reason == "length" and not is_whole


class AlertWatch:
    """Counts an engine over `count` intervals of `seconds` in all, from `begins` on.

    `reply_limit` is what clients allow a reply: one that was drawn shorter counts as ended by
    itself where it ends. By default none is, and what the engine says counts. Memory does not grow
    with the number of requests.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        begins: float,
        seconds: float,
        count: int = NUM_INTERVALS,
        reply_limit: float = 0.0,
    ) -> None:
        self._simulation = simulation
        self._reply_limit = reply_limit
        num_samples = count * SAMPLES if seconds > 0 else -1
        self._looks = [begins + seconds * n / num_samples for n in range(num_samples + 1)]
        self._num_looks = 0
        self._part: _Part | None = None
        self._intervals: list[Interval] = []
        self._adapters: dict[tuple[str, str], _Adapter] = {}
        self._installed = Counter[str]()
        """Before the first interval."""
        self._loads = Counter[str]()
        """Since then."""
        simulation.listen(self._take)

    def advance(self, until: float | None = None) -> None:
        """Let the engine go on until everything is over, or time is `until`."""
        while self._num_looks < len(self._looks):
            at = self._looks[self._num_looks]
            if until is not None and at > until:
                break
            self._simulation.advance(at)
            self._look(max(at, self._simulation.clock.now))
        self._simulation.advance(until)

    def findings(self) -> list[Finding]:
        """What is wrong with the engine and its adapters, by the rules of the service."""
        adapters = [
            AdapterInterval(
                tenant=tenant, adapter=adapter, requests=seen.requests, stop=seen.stop,
                length=seen.length, queue=seen.queue, loads=self._loads[adapter],
            )
            for (tenant, adapter), seen in self._adapters.items()
        ]  # fmt: skip
        return [*engine_findings(self._intervals), *adapter_findings(adapters)]

    def _look(self, now: float) -> None:
        stats = self._simulation.core.stats()
        self._num_looks += 1
        if self._part is None:
            self._part = _Part(now, stats)
            self._installed = Counter(self._simulation.runner.installs)
            return
        self._part.sample(stats)
        if (self._num_looks - 1) % SAMPLES:
            return
        self._intervals.append(self._part.close(now, stats))
        self._loads = self._simulation.runner.installs - self._installed
        self._part = _Part(now, stats) if self._num_looks < len(self._looks) else None

    def _take(self, record: SimulatedRequest) -> None:
        if self._part is None:
            return
        self._part.take(record)
        request = record.request
        if request.adapter is None:
            return
        key = request.tenant, request.adapter
        self._adapters.setdefault(key, _Adapter()).take(record, self._reply_limit)
