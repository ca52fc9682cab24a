"""The engine's step loop on a simulated clock: the same `EngineCore` that serves, no model.

    simulation = Simulation(SchedulerConfig(num_kv_blocks=512), step_time=LinearStepTime())
    simulation.send(0.0, request)           # what happens, in any order
    simulation.abort(1.5, request_id=1)
    report = simulation.run()

Deterministic: equal calls give equal reports. As in the engine's process, what arrives during a
step is seen after it, and nothing happens between steps but arrivals and loads that end.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.errors import RequestRefused
from engine.messages import EngineRequest, RequestOutput
from engine.scheduled_batch import ScheduledBatch
from engine.simulation.adapters import SimulatedAdapters
from engine.simulation.quick_core import QuickCore
from engine.simulation.record import Ending, SimulatedRequest, SimulationReport
from engine.simulation.rivals import Order
from engine.simulation.runner import SimulatedClock, SimulatedRunner, TokenScript
from engine.simulation.step_time import LinearStepTime, LoadTime, StepTime
from engine.simulation.use import UseMeter

CLIENT = "simulation"
MAX_EMPTY_STEPS = 100

FollowUp = Callable[[SimulatedRequest], Iterable[tuple[float, EngineRequest]]]
"""What a client sends when a request of its is over, and when: for closed loops."""


class SimulationStalled(Exception):
    """The engine has requests left and nothing it could wait for, or spins without a batch."""


class Simulation:
    """One engine, from its first event to the end of its last request.

    `load_seconds(digest)` is an adapter's way to host memory; None from it says that the load
    fails. `observe(simulation, batch)` is called before each batch is computed, `after_step` after
    each step of the core, with rows or without.

    A `quick` simulation gives the same report at a fraction of the cost: see `QuickScheduler`. It
    has no batches to observe and no tokens to script, and `step_time` is a `LoadTime`. It alone can
    have another `order` of service than the scheduler's own, see `engine.simulation.rivals`, and
    meters what is in use. With `on_finish` a request that is over is handed over and forgotten, so
    that the report has only those that are not.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        step_time: StepTime | None = None,
        load_seconds: Callable[[str], float | None] = lambda digest: 0.03,
        max_cpu_loras: int = 32,
        num_readers: int = 4,
        install_seconds: float = 0.0,
        script: TokenScript | None = None,
        eos_token_ids: Iterable[int] = (0,),
        vocab_size: int = 2**31,
        follow_up: FollowUp | None = None,
        observe: "Callable[[Simulation, ScheduledBatch], None] | None" = None,
        after_step: "Callable[[Simulation], None] | None" = None,
        on_finish: Callable[[SimulatedRequest], None] | None = None,
        quick: bool = False,
        order: Order = "fair",
    ) -> None:
        self.clock = SimulatedClock()
        self.config = config
        self.adapters = SimulatedAdapters(
            self.clock,
            load_seconds=load_seconds,
            capacity=max_cpu_loras,
            num_readers=num_readers,
        )
        self.runner = SimulatedRunner(
            self.clock,
            step_time or LinearStepTime(),
            script=script,
            install_seconds=install_seconds,
            observe=None if observe is None else lambda batch: observe(self, batch),
        )
        self.records: dict[int, SimulatedRequest] = {}
        """By request id, in the order in which they are sent."""
        self.use = UseMeter()
        self._quick: QuickCore | None = None
        if order != "fair" and not quick:
            raise ValueError("only a quick simulation has another order of service")
        if quick:
            if script or observe or after_step:
                raise ValueError("a quick simulation has no script, and nothing to observe")
            if not isinstance(self.runner.step_time, LoadTime):
                raise ValueError("a quick simulation needs a step time by load")
            self._quick = QuickCore(
                config,
                self.runner,
                self.adapters,
                eos_token_ids=tuple(eos_token_ids),
                vocab_size=vocab_size,
                clock=self.clock,
                step_time=self.runner.step_time,
                record_of=self.records.__getitem__,
                order=order,
            )
        self.core = self._quick or EngineCore(
            config,
            self.runner,
            self.adapters,
            eos_token_ids=tuple(eos_token_ids),
            vocab_size=vocab_size,
            clock=self.clock,
        )
        self._follow_up = follow_up
        self._after_step = after_step
        self._on_finish = on_finish
        self._listeners: list[Callable[[SimulatedRequest], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._order = itertools.count()
        self._num_unfinished = 0

    # -- what happens

    def send(self, at: float, request: EngineRequest) -> SimulatedRequest:
        """A request is sent. Its id is new to this simulation."""
        if request.request_id in self.records:
            raise ValueError(f"request id {request.request_id} is used twice")
        record = self.records[request.request_id] = SimulatedRequest(request, at)
        self._num_unfinished += 1
        self.at(at, lambda: self._add(record))
        return record

    def abort(self, at: float, request_id: int) -> None:
        """A client goes away; harmless if the request is over."""
        self.at(at, lambda: self._abort(request_id))

    def unload(self, at: float, digest: str) -> None:
        """An adapter is deleted."""
        self.at(at, lambda: self.core.unload(digest))

    def pin(self, at: float, digests: frozenset[str]) -> None:
        """These adapters, and no others, are pinned."""
        self.at(at, lambda: self.core.pin(digests))

    def at(self, at: float, action: Callable[[], None]) -> None:
        """Anything else, between two steps."""
        heappush(self._events, (at, next(self._order), action))

    def listen(self, on_end: Callable[[SimulatedRequest], None]) -> None:
        """Be told of each request that is over from now on."""
        self._listeners.append(on_end)

    # -- time

    def run(self, until: float | None = None) -> SimulationReport:
        """Go on until everything is over, or time is `until`; may be called again.

        Raises `SimulationStalled` if requests are left that nothing will ever end.
        """
        self.advance(until)
        return self.report()

    def advance(self, until: float | None = None) -> None:
        """As `run`, without a report."""
        num_empty_steps = 0
        quick = self._quick
        while until is None or self.clock.now < until:
            self._deliver()
            if not (self.core.has_work or self._has_adapter_events()):
                if not self._sleep(until):
                    break
                continue
            began, num_steps = self.clock.now, self.runner.num_steps
            outputs = None if quick is None else quick.skip(self._next_event_at(until))
            if outputs is None:
                outputs = self.core.step()
            now = self.clock.now
            if quick is not None:
                self.use.add(now - began, *quick.in_use())
            for _, output in outputs:
                self._take(output, now)
            if self._after_step is not None:
                self._after_step(self)
            num_empty_steps = 0 if self.runner.num_steps > num_steps else num_empty_steps + 1
            if num_empty_steps > MAX_EMPTY_STEPS:
                raise SimulationStalled(f"no batch in {MAX_EMPTY_STEPS} steps, at {now:.3f} s")

    def report(self) -> SimulationReport:
        """What happened so far."""
        return SimulationReport(
            requests=list(self.records.values()),
            seconds=self.clock.now,
            num_steps=self.runner.num_steps,
            num_preemptions=self.core.stats().preemptions,
            num_rows=self.runner.num_rows,
            num_loads=self.adapters.num_loads,
            num_installs=self.runner.num_installs,
            use=self.use,
        )

    def _deliver(self) -> None:
        events, now = self._events, self.clock.now
        while events and events[0][0] <= now:
            heappop(events)[2]()

    def _has_adapter_events(self) -> bool:
        at = self.adapters.next_event_at
        return at is not None and at <= self.clock.now

    def _next_event_at(self, until: float | None) -> float:
        times = (self.adapters.next_event_at, until, self._events[0][0] if self._events else None)
        return min((at for at in times if at is not None), default=math.inf)

    def _sleep(self, until: float | None) -> bool:
        """Until the next event; False if there is none, or not before `until`."""
        times = [self._events[0][0]] if self._events else []
        if (at := self.adapters.next_event_at) is not None:
            times.append(at)
        if not times:
            if self._num_unfinished:
                raise SimulationStalled(f"{self._num_unfinished} requests wait for nothing")
            return False
        wake_at = min(times)
        if until is not None and wake_at >= until:
            self.clock.now = until
            return False
        self.clock.now = max(self.clock.now, wake_at)
        return True

    # -- requests

    def _add(self, record: SimulatedRequest) -> None:
        record.queued = self.clock.now
        try:
            self.core.add(CLIENT, record.request)
        except RequestRefused as refusal:
            record.error_code = refusal.code
            self._finish(record, self.clock.now, "refused")

    def _abort(self, request_id: int) -> None:
        record = self.records.get(request_id)
        if record is not None and record.queued is not None and record.finished is None:
            self.core.abort(CLIENT, request_id)
            self._finish(record, self.clock.now, "abort")

    def _take(self, output: RequestOutput, now: float) -> None:
        record = self.records[output.request_id]
        num_tokens = 0
        for delta in output.deltas:
            num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None and record.finish_reason is None:
                record.finish_reason = delta.finish_reason
        if num_tokens:
            record.num_output_tokens += num_tokens
            record.token_times.append(now)
            if record.first_token is None:
                record.first_token = now
        if output.timing is not None:
            record.timing = output.timing
        if output.finished:
            record.num_cached_tokens = output.num_cached_tokens
            record.error_code = output.error_code
            self._finish(record, now, record.finish_reason or "error")

    def _finish(self, record: SimulatedRequest, now: float, reason: Ending) -> None:
        record.finished = now
        record.finish_reason = reason
        self._num_unfinished -= 1
        for on_end in self._listeners:
            on_end(record)
        if self._on_finish is not None:
            del self.records[record.request.request_id]
            self._on_finish(record)
        if self._follow_up is not None:
            for at, request in self._follow_up(record):
                self.send(at, request)
