"""The scheduler that serves, with short cuts for what a simulated step repeats.

Nothing is decided here: who runs is the base class's business. Two things are cheaper. A row that
decodes neither its first nor its last token is committed without a message to a client. And steps
in which nothing can happen but that all that runs decodes are taken at once, see `steady`.
All times, counters and states are those of the step-by-step way, to the last bit.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.scheduled_batch import SampledRow, SampledToken, StepResult
from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.policies import make_policy
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import StepPlan
from engine.simulation.record import SimulatedRequest
from engine.simulation.rivals import Order, rival_lifecycle
from engine.simulation.runner import FILLER_TOKEN_ID
from engine.simulation.step_load import StepLoad

FILLER = SampledToken(FILLER_TOKEN_ID)


class Lane(NamedTuple):
    """A sequence between its first and its last token, whose tokens go straight to its record."""

    last_position: int
    """Length of prompt and output at which the next token is the last one."""
    record: SimulatedRequest
    times: list[float]
    """The record's."""
    request: Request
    queue: AdapterQueue


class Steady(NamedTuple):
    """Steps in which nothing happens but that all that runs decodes."""

    num_steps: int
    """0: in the very next one some of it draws its last token, see `take_last_step`."""
    load: StepLoad
    """Of the first one; `StepLoad.next_decode` leads to the next one."""
    num_growing: int
    """Rows that are not finished; the others are computed for nothing."""
    longest_output: int
    """Of a batch that is padded: tokens that the longest of these has drawn."""


class QuickScheduler(Scheduler):
    """Every token that is drawn is `FILLER_TOKEN_ID`. `record_of` finds a request's record."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        clock: Callable[[], float],
        record_of: Callable[[int], SimulatedRequest],
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

    @property
    def has_notices(self) -> bool:
        """Whether the runner or the adapters' source is to be told something."""
        return self._lifecycle.slots.has_notices

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
        num_decodes = context = lora_tokens = 0
        slots: set[int] = set()
        for sequence, num_tokens in self._plan.grants.items():
            if num_tokens == 1:
                num_decodes += 1
                context += sequence.num_computed
            else:
                load.add(sequence.num_computed, num_tokens)
            if sequence.slot is not None:
                slots.add(sequence.slot)
                lora_tokens += num_tokens
        context += num_decodes
        load.num_rows += num_decodes
        load.num_tokens += num_decodes
        load.context += context
        load.pairs += context
        load.num_adapters, load.lora_tokens = len(slots), lora_tokens
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

    def steady(self) -> Steady | None:
        """The steps from now on in which nothing happens but that all that runs decodes.

        Provided that nothing arrives and no adapter does: then nobody can be admitted, because
        nobody waits, or all that waits is parked (its adapters are on their way), or it is one
        queue, at whose head admission stopped in the last step and would again. No sequence ends,
        and none lacks a block.
        """
        lifecycle = self._lifecycle
        waiting, running = lifecycle.waiting, lifecycle.running
        if not len(running) or len(self._outputs) or lifecycle.slots.has_notices:
            return None
        if self._config.enable_prefix_cache and not self._policy.keeps_finished:
            return None
        if waiting.num_waiting and not (self._is_parked() or self._waits_in_vain()):
            return None
        find_lane, num_steps = self._lanes.get, self._config.max_sequence_len
        context = num_growing = lora_tokens = 0
        slots: set[int] = set()
        for sequence in running:
            length = len(sequence.token_ids)
            context += length
            if sequence.slot is not None:
                slots.add(sequence.slot)
                lora_tokens += 1
            if sequence.finished:
                continue
            lane = find_lane(sequence.sequence_id) or self._lane_of(sequence)
            if lane is None:
                return None
            num_growing += 1
            num_steps = min(num_steps, lane.last_position - length)
        is_static = self._policy.keeps_finished
        # A static batch whose others were aborted, or have finished, ends with the next step.
        if not num_growing or (is_static and not num_steps) or not self._has_blocks(num_steps):
            return None
        num_rows = len(running)
        load = StepLoad(
            num_rows=num_rows, num_tokens=num_rows, context=context, pairs=context,
            num_adapters=len(slots), lora_tokens=lora_tokens,
        )  # fmt: skip
        longest = 0
        if is_static:
            for sequence in running:
                load.add_sampled(sequence.num_prompt_tokens, sequence.num_output_tokens)
            longest = max(s.num_output_tokens for s in running if not s.finished)
        return Steady(num_steps, load, num_growing, longest)

    def take_steps(self, times: SequenceOf[float]) -> None:
        """Steps that end at these times: the first ones, at least one, of those of `steady`."""
        lifecycle, began = self._lifecycle, self._time.now
        self._time.tick()
        self._busy_ns += self._time.now - began
        num_steps = len(times)
        self._num_steps += num_steps
        for _ in range(num_steps):
            lifecycle.gate.begin_step(is_idle=False)
        fillers, instant = [FILLER_TOKEN_ID] * num_steps, self._time.now
        blocks, block_size = lifecycle.blocks, self._config.block_size
        owed: dict[AdapterQueue, int] = {}
        for sequence in lifecycle.running:
            if sequence.finished:
                blocks.grow(sequence.block_table, len(sequence.token_ids))
                continue
            _, record, token_times, request, queue = self._lanes[sequence.sequence_id]
            sequence.token_ids.extend(fillers)
            sequence.num_computed += num_steps
            if sequence.num_computed > len(sequence.block_table) * block_size:
                blocks.grow(sequence.block_table, sequence.num_computed)
            request.last_token = instant
            token_times.extend(times)
            record.num_output_tokens += num_steps
            owed[queue] = owed.get(queue, 0) + num_steps
        self._charge(owed)

    def take_last_step(self, now: float) -> None:
        """The step after those of `steady`, if that says 0: it ends at `now`, in seconds."""
        lifecycle = self._lifecycle
        blocks, block_size = lifecycle.blocks, self._config.block_size
        self._step_began = self._time.now
        self._plan = StepPlan(self._config.max_num_batched_tokens)
        lifecycle.gate.begin_step(is_idle=False)
        for sequence in lifecycle.running:
            if len(sequence.token_ids) > len(sequence.block_table) * block_size:
                blocks.grow(sequence.block_table, len(sequence.token_ids))
            self._plan.grants[sequence] = 1
        self.commit_fillers(now)

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

    def _has_blocks(self, num_steps: int) -> bool:
        running, blocks = self._lifecycle.running, self._lifecycle.blocks
        if len(running) * (num_steps // blocks.block_size + 2) <= blocks.num_free:
            return True  # whatever room their last blocks have
        num_missing = sum(
            max(0, blocks.blocks_for(len(s.token_ids) + num_steps) - len(s.block_table))
            for s in running
        )
        return num_missing <= blocks.num_free

    def _is_parked(self) -> bool:
        waiting, gate = self._lifecycle.waiting, self._lifecycle.gate
        return (
            waiting.stopped is None
            and gate.oldest_claim is None
            and waiting.ready.min() is None
            and waiting.resuming.min() is None
            and waiting.unplaced.min() is None
            and (waiting.unfetched.min() is None or not gate.can_hasten)
        )

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
        is_whole = output_weight.is_integer()
        for queue, num_tokens in owed.items():
            self._num_output_tokens += num_tokens
            tenant = queue.tenant
            if (
                is_whole
                and (output_weight / tenant.weight).is_integer()
                and queue.counter.is_integer()
                and tenant.counter.is_integer()
            ):
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
