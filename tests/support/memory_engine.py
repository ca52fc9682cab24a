"""An engine core on a `MemoryRunner`, stepped by hand: its source and clock are the test's too."""

from collections.abc import Hashable, Sequence
from typing import Any

from engine.adapters.source import AdapterEvent, AdapterFailed, AdapterReady
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import EngineRequest, FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import (
    ScheduledBatch,
    StepResult,
)
from engine.telemetry.journal import Journal
from tests.support.memory_runner import EOS, VOCAB_SIZE, MemoryRunner, Overlap, expected_output


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(
    request_id: int,
    prompt: Sequence[int],
    *,
    tenant: str = "t",
    adapter: str | None = None,
    max_tokens: int = 4,
    n: int = 1,
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    **fields: Any,
) -> EngineRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=request_id,
        n=n,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
    )
    return EngineRequest(
        request_id=request_id,
        tenant=tenant,
        adapter=adapter,
        prompt_token_ids=list(prompt),
        sampling=sampling,
        label="base" if adapter is None else f"{adapter}@1",
        call=str(request_id),
        **fields,
    )


class FakeSource:
    """An `AdapterSource` whose loads end when the test says so, or by themselves if `auto`.

    Host memory holds `capacity` adapters that nobody wants, and all that are wanted.
    """

    def __init__(self, *, auto: bool = True, capacity: int = 2) -> None:
        self.auto = auto
        self.capacity = capacity
        self.pending: dict[str, None] = {}
        self.in_host: dict[str, None] = {}
        self.wanted: set[str] = set()
        self.forgotten: list[str] = []
        self.num_loads = 0
        self._events: list[AdapterEvent] = []

    def prefetch(self, digest: str) -> None:
        self.wanted.add(digest)
        if digest in self.in_host:
            self._events.append(AdapterReady(digest, 0.0))
        elif digest not in self.pending:
            self.pending[digest] = None
            if self.auto:
                self.deliver(digest)

    def deliver(self, digest: str) -> None:
        del self.pending[digest]
        self.num_loads += 1
        self.in_host[digest] = None
        self._events.append(AdapterReady(digest, 0.0))
        self._evict()

    def fail(self, digest: str, reason: str = "no such blob") -> None:
        del self.pending[digest]
        self._events.append(AdapterFailed(digest, reason))

    @property
    def has_events(self) -> bool:
        """Whether whoever sleeps would be woken."""
        return bool(self._events)

    def poll(self) -> list[AdapterEvent]:
        events, self._events = self._events, []
        return events

    def hasten(self, digest: str) -> None:
        pass

    def get(self, digest: str) -> str | None:
        return digest if digest in self.in_host else None

    def release(self, digest: str) -> None:
        self.wanted.discard(digest)
        self._evict()

    def forget(self, digest: str) -> None:
        self.in_host.pop(digest, None)
        self.forgotten.append(digest)

    def _evict(self) -> None:
        idle = [digest for digest in self.in_host if digest not in self.wanted]
        for digest in idle[: max(0, len(idle) - self.capacity)]:
            del self.in_host[digest]


class MemoryEngine:
    """Core, runner, source and clock joined; collects outputs by (client, request id)."""

    def __init__(
        self,
        *,
        source: FakeSource | None = None,
        step_seconds: float = 1.0,
        overlap: Overlap | None = None,
        **config: Any,
    ) -> None:
        defaults = {
            "num_kv_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_loras": 2,
        }
        self.config = SchedulerConfig(**(defaults | config))
        self.clock = FakeClock()
        self.runner = MemoryRunner(self.config)
        self.source = source or FakeSource()
        self.journal = Journal(clock=self.clock, wall_clock=self.clock)
        self.core = EngineCore(
            self.config,
            self.runner,
            self.source,
            eos_token_ids=[EOS],
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            launch=None if overlap is None else self.runner.launch,
            journal=self.journal,
        )
        if overlap is not None:
            self.runner.overlap = overlap
        self.runner.core = self.core
        self.step_seconds = step_seconds
        self.messages: dict[tuple[Hashable, int], EngineRequest] = {}
        self.outputs: dict[tuple[Hashable, int], list[RequestOutput]] = {}
        self.arrived_at: dict[tuple[Hashable, int], float] = {}
        self.first_token_at: dict[int, float] = {}
        self.finished_at: dict[int, float] = {}

    def add(self, message: EngineRequest, client: Hashable = "c") -> None:
        self.core.add(client, message)
        key = client, message.request_id
        self.messages[key] = message
        self.outputs[key] = []
        self.arrived_at[key] = self.clock.now

    def step(self) -> list[tuple[Hashable, RequestOutput]]:
        """One step, which takes `step_seconds`; integrity is checked after it."""
        batches_before, was_running = len(self.runner.batches), self.runner.is_running
        execute = self.runner.execute

        def timed_execute(batch: ScheduledBatch) -> StepResult:
            self.clock.now += self.step_seconds
            return execute(batch)

        self.runner.execute = timed_execute  # type: ignore[method-assign]
        try:
            outputs = self.core.step()
        finally:
            self.runner.execute = execute  # type: ignore[method-assign]
        if len(self.runner.batches) == batches_before and not was_running:
            self.clock.now += self.step_seconds / 100
        self.core.check_integrity()
        for client, output in outputs:
            key = client, output.request_id
            assert not self.is_over(key), "an output after the last one"
            self.outputs[key].append(output)
            if any(delta.token_ids for delta in output.deltas):
                self.first_token_at.setdefault(output.request_id, self.clock.now)
            if output.finished:
                self.finished_at[output.request_id] = self.clock.now
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing can run."""
        for _ in range(max_steps):
            if not (self.core.has_work or self.source.has_events):
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def is_over(self, key: tuple[Hashable, int]) -> bool:
        outputs = self.outputs[key]
        return bool(outputs) and outputs[-1].finished

    def last(self, request_id: int, client: Hashable = "c") -> RequestOutput:
        """The last output of a request that is over."""
        output = self.outputs[client, request_id][-1]
        assert output.finished and output.timing is not None
        return output

    def choice(
        self, request_id: int, choice: int = 0, client: Hashable = "c"
    ) -> tuple[list[int], FinishReason | None]:
        """All tokens of a choice so far, and how it ended."""
        tokens: list[int] = []
        reason: FinishReason | None = None
        for output in self.outputs[client, request_id]:
            for delta in output.deltas:
                if delta.index == choice:
                    assert reason is None, "a delta after the choice's last one"
                    tokens += delta.token_ids
                    reason = delta.finish_reason
        return tokens, reason

    def assert_as_alone(self, request_id: int, client: Hashable = "c") -> None:
        """Every choice of a request that is over equals its run alone."""
        message = self.messages[client, request_id]
        assert self.last(request_id, client).error is None
        for choice in range(message.sampling.n):
            expected = expected_output(message, choice, self.config.max_sequence_len)
            assert self.choice(request_id, choice, client) == expected

    def assert_at_rest(self) -> None:
        """Nothing waits, runs, or is held by anybody."""
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert not self.source.wanted, "an adapter is wanted by nobody's request"
        self.core.check_integrity()
