"""A runner with a KV memory of its own, checked at every access.

It stores (token, position, adapter, tenant) in the cell that a row's block table points to, and
draws the next token from the history that it reads back through the table. So a wrong table, copy,
slot or prefix hit changes tokens or raises; `expected_output` says what is right without any
engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.errors import AdapterUnavailable
from engine.messages import EngineRequest, FinishReason
from engine.runner.overlapped_runner import with_drawn_tokens
from engine.scheduled_batch import (
    SampledRow,
    SampledToken,
    SamplingRow,
    ScheduledBatch,
    StepResult,
)
from engine.scheduling.sequence import Sequence as EngineSequence

EOS = 0
VOCAB_SIZE = 40

Overlap = Literal["early", "late"]
"""When a step that was launched runs: at once, or when its result is asked for."""


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
    """An `engine.runner.protocol.RunningStep`."""

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


def running_sequences(core: EngineCore | None) -> dict[int, EngineSequence]:
    """Sequence id -> sequence; a test may look behind the contract, the runner may not."""
    assert core is not None
    scheduler = core._scheduler  # pyright: ignore[reportPrivateUsage]
    return {s.sequence_id: s for s in scheduler._lifecycle.running}  # pyright: ignore[reportPrivateUsage]
