"""The engine's records as tests make them, and an engine that only tells what a test gives it."""

from collections.abc import Sequence

from engine.engine_stats import EngineStats, QueueStats, TenantLoad
from engine.errors import EngineUnavailable
from engine.telemetry.records import (
    AdapterTotals,
    Cursor,
    EngineTotals,
    Histogram,
    Objective,
    RequestRecord,
    SlotEvent,
    StepRecord,
    StepSeconds,
    StepShare,
    Telemetry,
)

NOW = 1_800_000_000.0
"""A quarter of an hour begins."""


def request_record(**changes: object) -> RequestRecord:
    """A request of `acme` for `tone@1` that ended at `NOW`, with half a second of queue time."""
    values: dict[str, object] = {
        "call": "chatcmpl-1",
        "tenant": "acme",
        "adapter": "tone",
        "version": 1,
        "arrived": NOW - 1.0,
        "queue": {"slot": 0.2, "turn": 0.05},
        "load_seconds": 0.0,
        "ttft": 0.4,
        "seconds": 1.0,
        "decode_seconds": 0.6,
        "longest_gap": 0.1,
        "prompt_tokens": 12,
        "cached_tokens": 4,
        "output_tokens": 11,
        "finish_reasons": ("stop",),
        "preemptions": 0,
        "timeline": ((0.0, "queued"), (0.25, "prefill"), (0.4, "decode"), (1.0, "done")),
    }
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def step_record(at: float = NOW, shares: Sequence[StepShare] = (), **changes: object) -> StepRecord:
    """A step of 10 ms."""
    values: dict[str, object] = {
        "at": at,
        "number": 1,
        "seconds": StepSeconds(0.001, 0.001, 0.005, 0.001, 0.001, 0.001),
        "shares": tuple(shares) or (StepShare("acme", "tone@1", 1, 12, 2),),
        "adapters": 1,
        "running": 3,
        "waiting": 1,
        "kv_blocks_used": 8,
        "kv_blocks_total": 64,
        "slots_used": 1,
        "slots_total": 2,
        "preemptions": 0,
    }
    return StepRecord(**{**values, **changes})  # type: ignore[arg-type]


def stats(queues: Sequence[QueueStats] = (), **changes: object) -> EngineStats:
    values: dict[str, object] = {
        "running": 3,
        "waiting": 1,
        "kv_blocks_used": 16,
        "kv_blocks_total": 64,
        "slots_used": 1,
        "slots_total": 2,
        "resident": [],
        "preemptions": 0,
        "steps": 10,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": 0,
        "host_adapters": 0,
        "host_adapter_bytes": 0,
        "queues": list(queues),
        "tenants": [
            TenantLoad(
                tenant,
                sum(q.running for q in queues if q.tenant == tenant),
                sum(q.waiting for q in queues if q.tenant == tenant),
            )
            for tenant in sorted({q.tenant for q in queues})
        ],
    }
    return EngineStats(**{**values, **changes})  # type: ignore[arg-type]


def adapter_totals(tenant: str, adapter: str | None, refused: dict[str, int]) -> AdapterTotals:
    def none() -> Histogram:
        return Histogram([0])

    return AdapterTotals(
        tenant=tenant, adapter=adapter, requests={}, queue={}, queue_total=none(), ttft=none(),
        seconds_per_token=none(), seconds=none(), load_seconds=none(), resident_seconds=0.0,
        prompt_tokens=0, cached_tokens=0, output_tokens=0, preemptions=0, refused=refused, good=0,
    )  # fmt: skip


def totals(started: float = NOW - 100, adapters: Sequence[AdapterTotals] = ()) -> EngineTotals:
    def none() -> Histogram:
        return Histogram([0])

    return EngineTotals(
        started=started, objective=Objective(), adapters=list(adapters), steps=0, step_parts={},
        step_seconds=none(), step_rows=none(), step_tokens=none(), step_adapters=none(),
    )  # fmt: skip


class ToldEngine:
    """Tells each record once, as `tell` put them; `generation` 0 does not answer."""

    def __init__(self) -> None:
        self.generation = 1
        self.started = NOW - 100
        self.stats_now = stats()
        self.refused: list[AdapterTotals] = []
        self.missed = 0
        self.num_asked = 0
        self._requests: list[RequestRecord] = []
        self._steps: list[StepRecord] = []
        self._events: list[SlotEvent] = []

    def tell(
        self,
        requests: Sequence[RequestRecord] = (),
        steps: Sequence[StepRecord] = (),
        events: Sequence[SlotEvent] = (),
    ) -> None:
        self._requests += requests
        self._steps += steps
        self._events += events

    def restart(self, started: float) -> None:
        self.generation += 1
        self.started = started
        self._requests, self._steps, self._events = [], [], []

    async def stats(self) -> EngineStats:
        if self.generation == 0:
            raise EngineUnavailable("the engine is not there")
        return self.stats_now

    async def telemetry(
        self, cursor: Cursor, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        if self.generation == 0:
            raise EngineUnavailable("the engine is not there")
        self.num_asked += 1
        if cursor.generation != self.generation:
            cursor = Cursor(self.generation)
        requests = self._requests[cursor.requests :]
        steps = self._steps[cursor.steps :]
        events = self._events[cursor.slot_events :]
        missed, self.missed = self.missed, 0
        return Telemetry(
            generation=self.generation,
            call_id=1,
            cursor=Cursor(
                self.generation,
                cursor.requests + len(requests[:limit]),
                cursor.steps + len(steps[:limit]),
                cursor.slot_events + len(events[:limit]),
            ),
            requests=requests[:limit],
            steps=steps[:limit],
            slot_events=events[:limit],
            missed=missed,
            has_more=max(len(requests), len(steps), len(events)) > limit,
            totals=totals(self.started, self.refused) if with_totals else None,
        )
