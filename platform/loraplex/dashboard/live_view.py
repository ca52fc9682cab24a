"""What the last ten seconds were like, for whoever looks, from the engine's newest records."""

from collections import deque
from collections.abc import Callable, Iterable

from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats, TenantLoad
from engine.telemetry.adapter_totals import is_good
from engine.telemetry.records import Objective, RequestRecord, StepRecord, Telemetry
from loraplex.dashboard.views import EngineNow, Live, Percentiles
from loraplex.recorder.sketch import Sketch

SECONDS = 10.0
MAX_STEPS = 480


class Recent:
    """The engine's newest records and its newest snapshot."""

    def __init__(self) -> None:
        self.at = 0.0
        """When the engine last answered, Unix seconds; 0: never."""
        self.generation = 0
        self.stats: EngineStats | None = None
        self.objective = Objective()
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self.requests: deque[RequestRecord] = deque()

    def take(self, answer: Telemetry, stats: EngineStats, now: float) -> None:
        """Take in an answer; what another engine did before is forgotten."""
        if answer.generation != self.generation:
            self.steps.clear()
            self.requests.clear()
            self.generation = answer.generation
        if answer.totals is not None:
            self.objective = answer.totals.objective
        self.at, self.stats = now, stats
        self.steps += answer.steps
        self.requests += answer.requests
        while self.requests and _ended(self.requests[0]) < now - 6 * SECONDS:
            self.requests.popleft()


def live_view(
    recent: Recent, info: EngineInfo | None, tenant: str | None, now: float,
    *, is_up: bool, missed: int = 0,
) -> Live:  # fmt: skip
    """The event `live`. A tenant's has its own figures and nothing of the engine."""
    since = now - SECONDS
    ended = [
        record
        for record in recent.requests
        if _ended(record) >= since and tenant in (None, record.tenant)
    ]
    steps = [step for step in recent.steps if step.at >= since]
    good = sum(is_good(record, recent.objective) for record in ended)
    prompt_tokens, output_tokens = _tokens(steps, tenant)
    running, waiting, by_cause = _queues(recent.stats, tenant)
    return Live(
        at=recent.at,
        engine_up=is_up,
        running=running,
        waiting=waiting,
        waiting_by_cause=by_cause,
        requests_rate=len(ended) / SECONDS,
        prompt_tokens_rate=prompt_tokens / SECONDS,
        output_tokens_rate=output_tokens / SECONDS,
        goodput_rate=good / SECONDS,
        goodput_share=good / len(ended) if ended else None,
        ttft=_percentiles(record.ttft for record in ended),
        token_gap=_percentiles(
            record.longest_gap for record in ended if record.seconds_per_token is not None
        ),
        token_time=_percentiles(record.seconds_per_token for record in ended),
        engine=_engine(recent, info, steps, ended) if tenant is None else None,
        missed_records=missed,
    )


def _ended(record: RequestRecord) -> float:
    return record.arrived + record.seconds


def _tokens(steps: Iterable[StepRecord], tenant: str | None) -> tuple[int, int]:
    shares = [s for step in steps for s in step.shares if tenant in (None, s.tenant)]
    return sum(s.prefill_tokens for s in shares), sum(s.decode_rows for s in shares)


def _queues(stats: EngineStats | None, tenant: str | None) -> tuple[int, int, dict[str, int]]:
    """Running and waiting sequences, and what those wait for."""
    if stats is None:
        return 0, 0, {}
    queues = [queue for queue in stats.queues if tenant in (None, queue.tenant)]
    by_cause: dict[str, int] = {}
    for queue in queues:
        if queue.cause is not None:
            by_cause[queue.cause] = by_cause.get(queue.cause, 0) + queue.waiting
    if tenant is None:
        return stats.running, stats.waiting, by_cause
    own = load_of(stats, tenant)
    return own.running, own.waiting, by_cause


def load_of(stats: EngineStats, tenant: str) -> TenantLoad:
    """What runs and waits of a tenant."""
    nothing = TenantLoad(tenant, 0, 0)
    return next((load for load in stats.tenants if load.tenant == tenant), nothing)


def _engine(
    recent: Recent,
    info: EngineInfo | None,
    steps: Iterable[StepRecord],
    ended: Iterable[RequestRecord],
) -> EngineNow | None:
    stats = recent.stats
    if stats is None:
        return None
    prompt = _sum(ended, lambda record: record.prompt_tokens)
    cached = _sum(ended, lambda record: record.cached_tokens)
    return EngineNow(
        generation=str(recent.generation),
        running=stats.running,
        max_running=info.max_num_seqs if info is not None else 0,
        kv_blocks_used=stats.kv_blocks_used,
        kv_blocks_total=stats.kv_blocks_total,
        slots_used=stats.slots_used,
        slots_total=stats.slots_total,
        prefix_hit_share=cached / prompt if prompt else None,
        step_seconds=_percentiles(step.seconds.total for step in steps),
    )


def _sum(records: Iterable[RequestRecord], value: Callable[[RequestRecord], int]) -> int:
    return sum(map(value, records))


def _percentiles(values: Iterable[float | None]) -> Percentiles:
    sketch = Sketch.of(value for value in values if value is not None)
    return Percentiles(*sketch.quantiles(0.5, 0.95, 0.99))
