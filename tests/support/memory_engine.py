"""An engine core on a runner that has a KV memory of its own, checked at every access.

The runner stores (token, position, adapter, tenant) in the cell that a row's block table points
to, and draws the next token from the history that it reads back through the table. So a wrong
table, copy, slot or prefix hit changes tokens or raises; `expected_output` says what is right
without any engine.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from engine.adapter_source import AdapterEvent, AdapterFailed, AdapterReady
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.errors import AdapterUnavailable
from engine.messages import EngineRequest, FinishReason, RequestOutput
from engine.overlapped_runner import with_drawn_tokens
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import (
    SampledRow,
    SampledToken,
    SamplingRow,
    ScheduledBatch,
    StepResult,
)
from engine.sequence import Sequence as EngineSequence
from engine.telemetry.journal import Journal

EOS = 0
VOCAB_SIZE = 40

Overlap = Literal["early", "late"]
"""When a step that was launched runs: at once, or when its result is asked for."""


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


def draw(history: Sequence[int], adapter: str | None, seed: int, choice: int) -> int:
    """The next token after `history`: any change of what it depends on changes it."""
    noise = sha256(repr((list(history), adapter, seed, choice)).encode()).digest()
    return int.from_bytes(noise[:4], "little") % VOCAB_SIZE


def expected_output(
    message: EngineRequest, choice: int, max_sequence_len: int
) -> tuple[list[int], FinishReason]:
    """Tokens and finish reason of one choice, as a run of its own would have them."""
    tokens, params = list(message.prompt_token_ids), message.sampling
    while True:
        token = draw(tokens, message.adapter, params.seed, choice)
        tokens.append(token)
        output = tokens[len(message.prompt_token_ids) :]
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) == max_sequence_len:
            return output, "length"


class Cell(NamedTuple):
    token: int
    position: int
    adapter: str | None
    tenant: str


class MemoryRunner:
    """A `Runner` whose KV memory is a dictionary of cells."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cells: dict[tuple[int, int], Cell] = {}
        self.slots: dict[int, str] = {}
        self.batches: list[ScheduledBatch] = []
        self.num_copies = 0
        self.failing_requests: set[int] = set()
        self.broken_adapters: set[str] = set()
        self.core: EngineCore | None = None
        self.overlap: Overlap = "early"
        self._owners: dict[int, EngineRequest] = {}
        self._flights: list[Flight] = []
        self._drawn: Sequence[SampledRow | None] = ()

    @property
    def is_running(self) -> bool:
        """Whether a step was launched whose result nobody has asked for."""
        return bool(self._flights)

    def launch(self, batch: ScheduledBatch) -> "Flight":
        """See `OverlappingRunner.launch`; block tables are as they are now, whatever is freed."""
        assert len(self._flights) < 2, "a step may be launched behind one other"
        assert bool(batch.follows) == self.is_running
        rows = [row._replace(block_table=tuple(row.block_table)) for row in batch.rows]
        batch = replace(batch, rows=rows)
        self._owners_of(batch)

        def run() -> StepResult:
            whole = batch
            if batch.follows:
                whole = replace(batch, rows=with_drawn_tokens(batch, self._drawn))
            result = self.execute(whole)
            self._drawn = result.rows
            return result

        flight = Flight(run, self._flights)
        self._flights.append(flight)
        if self.overlap == "early":
            flight.run()
        return flight

    def install_adapter(self, slot: int, weights: str) -> None:
        assert not self.is_running, "a slot is changed while a step runs"
        if weights in self.broken_adapters:
            raise AdapterUnavailable(weights, "not for this base")
        assert slot not in self.slots, "a slot is loaded over another adapter"
        assert 0 <= slot < self.config.max_loras
        self.slots[slot] = weights
        assert len(set(self.slots.values())) == len(self.slots), "an adapter in two slots"

    def clear_slot(self, slot: int) -> None:
        assert not self.is_running, "a slot is changed while a step runs"
        self.slots.pop(slot, None)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.batches.append(batch)
        for slot in batch.cleared_slots:
            self.clear_slot(slot)
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        owners = self._owners_of(batch)
        self._check_slots(batch, owners)
        self._copy(batch)
        self._write(batch, owners)
        return StepResult(
            [
                None
                if row.sampling is None
                else self._sample(
                    row.sampling, self._read(row, owners[row.sequence_id]), owners[row.sequence_id]
                )
                for row in batch.rows
            ]
        )

    def _owners_of(self, batch: ScheduledBatch) -> dict[int, EngineRequest]:
        sequences = running_sequences(self.core)
        for row in batch.rows:
            if row.sequence_id in sequences:
                self._owners[row.sequence_id] = sequences[row.sequence_id].request.message
        return {row.sequence_id: self._owners[row.sequence_id] for row in batch.rows}

    def _check_slots(self, batch: ScheduledBatch, owners: dict[int, EngineRequest]) -> None:
        for row in batch.rows:
            adapter = None if row.slot is None else self.slots[row.slot]
            assert adapter == owners[row.sequence_id].adapter, "another adapter's slot"

    def _copy(self, batch: ScheduledBatch) -> None:
        size = self.config.block_size
        destinations = [destination for _, destination in batch.block_copies]
        assert len(set(destinations)) == len(destinations)
        self.num_copies += len(destinations)
        # All reads come first, as in a gather and scatter on a device.
        contents = [
            [self.cells.get((source, offset)) for offset in range(size)]
            for source, _ in batch.block_copies
        ]
        for destination, cells in zip(destinations, contents, strict=True):
            for offset, cell in enumerate(cells):
                self.cells.pop((destination, offset), None)
                if cell is not None:
                    self.cells[destination, offset] = cell

    def _write(self, batch: ScheduledBatch, owners: dict[int, EngineRequest]) -> None:
        size = self.config.block_size
        written: set[tuple[int, int]] = set()
        for row in batch.rows:
            owner = owners[row.sequence_id]
            end = row.start + len(row.token_ids)
            assert len(row.block_table) == -(-end // size), "blocks of 0 .. end, and no more"
            for position, token in enumerate(row.token_ids, row.start):
                key = row.block_table[position // size], position % size
                assert key not in written, "two rows write one cell"
                written.add(key)
                self.cells[key] = Cell(token, position, owner.adapter, owner.tenant)
        blocks_written = {block for block, _ in written}
        for row in batch.rows:
            first_written = row.start // size
            shared = set(row.block_table[:first_written]) & blocks_written
            assert not shared, "a block that another row reads is written"

    def _read(self, row: Any, owner: EngineRequest) -> list[int]:
        size = self.config.block_size
        tokens: list[int] = []
        for position in range(row.start + len(row.token_ids)):
            cell = self.cells[row.block_table[position // size], position % size]
            assert (cell.position, cell.adapter, cell.tenant) == (
                position,
                owner.adapter,
                owner.tenant,
            ), "the K/V of somebody else"
            tokens.append(cell.token)
        return tokens

    def _sample(
        self, sampling: SamplingRow, history: list[int], owner: EngineRequest
    ) -> SampledRow:
        if owner.request_id in self.failing_requests:
            return SampledRow(error="no distribution left")
        return SampledRow(
            tuple(
                SampledToken(draw(history, owner.adapter, sampling.params.seed, choice))
                for choice in sampling.choices
            )
        )


class Flight:
    """An `engine.runner.RunningStep`."""

    def __init__(self, compute: Callable[[], StepResult], flights: "list[Flight]") -> None:
        self._compute = compute
        self._flights = flights
        self._result: StepResult | None = None

    def run(self) -> None:
        if self._result is None:
            self._result = self._compute()

    def result(self) -> StepResult:
        assert self._flights[0] is self, "results are asked for in the order of the launches"
        self.run()
        del self._flights[0]
        assert self._result is not None
        return self._result


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


def running_sequences(core: EngineCore | None) -> dict[int, EngineSequence]:
    """Sequence id -> sequence; a test may look behind the contract, the runner may not."""
    assert core is not None
    scheduler = core._scheduler  # pyright: ignore[reportPrivateUsage]
    return {s.sequence_id: s for s in scheduler._lifecycle.running}  # pyright: ignore[reportPrivateUsage]
