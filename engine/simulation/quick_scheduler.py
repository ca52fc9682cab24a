"""The scheduler that serves, with short cuts for what a simulated step repeats.

Nothing is decided here: who runs is the base class's business. Two things are cheaper. A row that
decodes neither its first nor its last token is committed without a message to a client. And steps
in which nothing can happen but that all that runs decodes are taken at once, see `steady_steps`.
All times, counters and states are those of the step-by-step way, to the last bit.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from engine.adapter_queue import AdapterQueue
from engine.config import SchedulerConfig
from engine.policies import make_policy
from engine.request import Request
from engine.scheduled_batch import SampledRow, SampledToken, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.simulation.record import RequestRecord
from engine.simulation.rivals import Order, rival_lifecycle
from engine.simulation.runner import FILLER_TOKEN_ID
from engine.simulation.step_load import StepLoad
from engine.step_plan import StepPlan

FILLER = SampledToken(FILLER_TOKEN_ID)


class Lane(NamedTuple):
    """A sequence between its first and its last token, whose tokens go straight to its record."""

    last_position: int
    """Length of prompt and output at which the next token is the last one."""
    record: RequestRecord
    times: list[float]
    """The record's."""
    request: Request
    queue: AdapterQueue


class QuickScheduler(Scheduler):
    """Every token that is drawn is `FILLER_TOKEN_ID`. `record_of` finds a request's record."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        clock: Callable[[], float],
        record_of: Callable[[int], RequestRecord],
        order: Order = "fair",
    ) -> None:
        super().__init__(config, eos_token_ids=eos_token_ids, vocab_size=vocab_size, clock=clock)
        if order != "fair":
            self._lifecycle = rival_lifecycle(order, config, self._time)
            self._policy = make_policy(config, self._lifecycle)
        self._record_of = record_of
        self._lanes: dict[int, Lane] = {}
        self._is_steady = False
        """Whether the last step decoded all that runs, and made no room for what waits."""

    # -- one step

    def plan(self) -> StepPlan:
        """As `schedule`, but without the rows."""
        self._time.tick()
        self._step_began = self._time.now
        self._plan = StepPlan(self._config.max_num_batched_tokens)
        self._lifecycle.waiting.stop_at(None, "turn")
        self._collect_debts()
        self._policy.fill(self._plan)
        self._lifecycle.blocks.take_copies()
        for sequence_id in self._plan.preempted:
            self._lanes.pop(sequence_id, None)
        return self._plan

    def step_load(self) -> StepLoad:
        """Of the step that was planned."""
        if self._plan.fillers or self._policy.keeps_finished:
            return StepLoad.of(self._plan.batch(self._lifecycle.blocks, self._lifecycle.slots))
        load = StepLoad()
        num_decodes = context = 0
        for sequence, num_tokens in self._plan.grants.items():
            if num_tokens == 1:
                num_decodes += 1
                context += sequence.num_computed
            else:
                load.add(sequence.num_computed, num_tokens)
        context += num_decodes
        load.num_rows += num_decodes
        load.num_tokens += num_decodes
        load.context += context
        load.pairs += context
        if self._config.max_loras:
            slots = {sequence.slot for sequence in self._plan.grants}
            slots.discard(None)
            load.num_adapters = len(slots)
            load.lora_tokens = load.num_tokens - sum(
                num_tokens for s, num_tokens in self._plan.grants.items() if s.slot is None
            )
        return load

    def commit_fillers(self, now: float) -> None:
        """As `commit`, at `now` in seconds, with a filler for every row that samples."""
        grants = self._plan.grants
        if self._policy.keeps_finished:
            self._commit_rows()
            return
        self._time.tick()
        self._num_steps += 1
        self._busy_ns += self._time.now - self._step_began
        instant, has_cache = self._time.now, self._config.enable_prefix_cache
        self._is_steady = not self._plan.preempted and len(grants) == len(self._lifecycle.running)
        find_lane = self._lanes.get
        owed: dict[AdapterQueue, int] = {}
        for sequence, num_tokens in grants.items():
            lane = find_lane(sequence.sequence_id)
            token_ids = sequence.token_ids
            if lane is None or len(token_ids) >= lane.last_position:
                self._charge(owed)
                self._commit_one(sequence, num_tokens)
                continue
            sequence.num_computed += 1
            if has_cache:
                self._lifecycle.publish(sequence)
            token_ids.append(FILLER_TOKEN_ID)
            _, record, times, request, queue = lane
            request.last_token = instant
            times.append(now)
            record.num_output_tokens += 1
            owed[queue] = owed.get(queue, 0) + 1
        self._charge(owed)

    # -- many steps

    def steady_steps(self) -> int:
        """In so many steps from now on nothing happens but that all that runs decodes.

        Provided that nothing arrives and no adapter does: then nobody can be admitted, because
        nobody waits, or because all that waits is one queue, at whose head admission stopped in the
        last step and would again. No sequence ends, and none lacks a block.
        """
        lifecycle = self._lifecycle
        waiting, running = lifecycle.waiting, lifecycle.running
        if not len(running) or len(self._outputs) or lifecycle.slots.has_notices:
            return 0
        if self._config.enable_prefix_cache and not self._policy.keeps_finished:
            return 0
        if waiting.num_waiting and not self._waits_in_vain():
            return 0
        steps, is_growing = self._config.max_sequence_len, False
        for sequence in running:
            if sequence.finished:
                continue
            lane = self._lanes.get(sequence.sequence_id) or self._lane_of(sequence)
            if lane is None:
                return 0
            is_growing = True
            left = lane.last_position - len(sequence.token_ids)
            if left < steps:
                if left < 2:  # an ordinary step costs less
                    return 0
                steps = left
        if not is_growing:  # a static batch whose others were aborted ends with the next step
            return 0
        blocks = lifecycle.blocks
        num_blocks = sum(
            max(0, blocks.blocks_for(len(s.token_ids) + steps) - len(s.block_table))
            for s in running
        )
        return steps if num_blocks <= blocks.num_free else 0

    def steady_load(self) -> StepLoad:
        """Of the first of these steps; `next_decode` leads to the next one."""
        load = StepLoad()
        slots: set[int] = set()
        for sequence in self._lifecycle.running:
            load.add(len(sequence.token_ids) - 1, 1)
            if sequence.slot is not None:
                slots.add(sequence.slot)
                load.lora_tokens += 1
            if self._policy.keeps_finished:
                load.add_sampled(sequence.num_prompt_tokens, sequence.num_output_tokens)
        load.num_adapters = len(slots)
        return load

    def growing(self) -> list[Sequence]:
        """Running sequences that are not finished; the others are computed for nothing."""
        return [sequence for sequence in self._lifecycle.running if not sequence.finished]

    def take_steps(self, times: SequenceOf[float]) -> None:
        """Steps that end at these times, at least one and at most `steady_steps`."""
        lifecycle, began = self._lifecycle, self._time.now
        self._time.tick()
        self._busy_ns += self._time.now - began
        num_steps = len(times)
        self._num_steps += num_steps
        for _ in range(num_steps):
            lifecycle.gate.begin_step(is_idle=False)
        fillers = [FILLER_TOKEN_ID] * num_steps
        owed: dict[AdapterQueue, int] = {}
        for sequence in lifecycle.running:
            if sequence.finished:
                lifecycle.blocks.grow(sequence.block_table, len(sequence.token_ids))
                continue
            lane = self._lanes[sequence.sequence_id]
            sequence.token_ids.extend(fillers)
            sequence.num_computed += num_steps
            lifecycle.blocks.grow(sequence.block_table, sequence.num_computed)
            sequence.request.last_token = self._time.now
            lane.record.token_times.extend(times)
            lane.record.num_output_tokens += num_steps
            queue = sequence.request.queue
            owed[queue] = owed.get(queue, 0) + num_steps
        self._charge(owed)

    def in_use(self) -> tuple[int, int, int]:
        """KV blocks, adapter slots, and sequences that run."""
        lifecycle = self._lifecycle
        return lifecycle.blocks.num_used, lifecycle.slots.num_placed, len(lifecycle.running)

    # -- private

    def _commit_rows(self) -> None:
        rows = [
            SampledRow((FILLER,) * sequence.num_seats)
            if sequence.num_computed + num_tokens == len(sequence.token_ids)
            else None
            for sequence, num_tokens in self._plan.grants.items()
        ]
        self.commit(StepResult([*rows, *[None] * len(self._plan.fillers)]))

    def _commit_one(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.is_prefilling:
            self._is_steady = False
        sequence.num_computed += num_tokens
        self._lifecycle.publish(sequence)
        if sequence.num_computed == len(sequence.token_ids):
            self._take_row(sequence, SampledRow((FILLER,) * sequence.num_seats))
            if sequence.is_running:
                self._lane_of(sequence)

    def _lane_of(self, sequence: Sequence) -> Lane | None:
        lane = self._lanes.get(sequence.sequence_id)
        if lane is None and self._is_plain(sequence):
            request = sequence.request
            record = self._record_of(request.key.request_id)
            length = sequence.num_prompt_tokens + sequence.params.max_tokens
            last_position = min(length, self._max_sequence_len) - 1
            lane = Lane(last_position, record, record.token_times, request, request.queue)
            self._lanes[sequence.sequence_id] = lane
        return lane

    def _is_plain(self, sequence: Sequence) -> bool:
        params = sequence.params
        is_alone = params.n == 1 and params.logprobs is None
        ends_early = FILLER_TOKEN_ID in params.stop_token_ids or (
            FILLER_TOKEN_ID in self._eos_token_ids and not params.ignore_eos
        )
        is_decoding = sequence.num_drawn > 0 and sequence.num_uncomputed == 1
        return is_alone and is_decoding and not ends_early

    def _waits_in_vain(self) -> bool:
        waiting = self._lifecycle.waiting
        queue = waiting.stopped
        if queue is None or len(queue) < waiting.num_waiting or queue.tenant.has_reservation:
            return False
        if self._policy.keeps_finished:  # in its first step a batch may have wanted for blocks
            return queue.ledger.cause == "budget"
        return self._is_steady

    def _charge(self, owed: dict[AdapterQueue, int]) -> None:
        """Book output tokens by queue, as if one by one."""
        output_weight = float(self._config.output_weight)
        for queue, num_tokens in owed.items():
            self._num_output_tokens += num_tokens
            tenant = queue.tenant
            parts = (output_weight, output_weight / tenant.weight, queue.counter, tenant.counter)
            if all(part.is_integer() for part in parts):
                self._lifecycle.charge(queue, num_tokens * output_weight)
            else:  # floats round, so the order of additions counts
                for _ in range(num_tokens):
                    self._lifecycle.charge(queue, output_weight)
        owed.clear()

    def _leave(self, sequence: Sequence) -> None:
        self._is_steady = False
        self._lanes.pop(sequence.sequence_id, None)
        super()._leave(sequence)

    def _end(self, request: Request) -> None:
        self._is_steady = False
        for sequence in request.sequences:
            self._lanes.pop(sequence.sequence_id, None)
        super()._end(request)
