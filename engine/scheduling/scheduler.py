"""Continuous batching: which sequences run in each step, of which adapters, in which blocks.

Pure Python, deterministic given its calls and its clock; the same class drives the real engine
and a simulation. A step is `schedule` -> the runner computes the batch -> `commit`.

    request_checks   refuses what could never run
    waiting          queues of (tenant, adapter), in the order of fairness
    admission        who is next, and when to stop
    slot_gate        who gets an adapter slot, and at whose expense
    policies         how a step divides its tokens
    lifecycle        moves sequences: waiting, running, preempted, ended
"""

from collections.abc import Callable, Hashable, Iterable

from engine.config import SchedulerConfig
from engine.engine_stats import EngineStats
from engine.errors import RequestRefused
from engine.messages import EndCalls, EngineRequest, RequestOutput
from engine.scheduled_batch import (
    SampledRow,
    SampledToken,
    ScheduledBatch,
    SlotLoad,
    StepResult,
)
from engine.scheduling.adapter_slots import AdapterNotices, SlotState
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.outputs import Outputs
from engine.scheduling.plan_ahead import ahead_batch, plan_ahead
from engine.scheduling.policies import make_policy
from engine.scheduling.request import Request, RequestKey
from engine.scheduling.request_checks import check_request, check_room
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_clock import StepClock
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.step_report import Composition, EngineLoad, composition_of, load_of, stats_of
from engine.telemetry.observer import Observer
from engine.telemetry.records import EndReason


class Scheduler:
    """Queues requests, plans steps, and turns what was drawn into outputs.

    A choice ends with `stop` at an EOS id or one of its stop ids, even if that is the last token
    it may have. It ends with `length` at `max_tokens`, or when prompt and output fill
    `max_sequence_len`. It ends with `error` if its row could not be sampled or its adapter could
    not be had, and all choices of the request with it. An aborted request gets no output. Masking
    EOS until `min_tokens` is the sampler's job.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        clock: Callable[[], float],
        observer: Observer | None = None,
    ) -> None:
        self._config = config
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_sequence_len = config.max_sequence_len
        self._time = StepClock(clock)
        self._observer = observer
        self._lifecycle = Lifecycle(config, self._time, observer)
        self._policy = make_policy(config, self._lifecycle)
        self._plan = StepPlan(0)
        self._ahead: StepPlan | None = None
        """The plan of the step after `_plan`, if it was made before `_plan` was committed."""
        self._num_ahead = 0
        """How many steps in a row were planned ahead."""
        self._outputs = Outputs()
        self._requests: dict[Hashable, dict[int, Request]] = {}
        self._num_arrivals = 0
        self._num_steps = 0
        self._step_began = self._time.now
        self._busy_ns = 0
        self._num_output_tokens = 0

    # -- requests

    def add(self, client: Hashable, message: EngineRequest) -> None:
        """Queue a request; raises `RequestRefused`."""
        self._time.tick()
        lifecycle = self._lifecycle
        check_request(message, self._config, vocab_size=self._vocab_size)
        check_room(message, self._config, lifecycle.waiting, now=self._time.now)
        requests = self._requests.setdefault(client, {})
        if message.request_id in requests:
            raise RequestRefused("duplicate_request_id", "this request id is in use")
        self._num_arrivals += 1
        request = requests[message.request_id] = Request(
            RequestKey(client, message.request_id),
            message,
            lifecycle.waiting.queue_of(message),
            arrival_number=self._num_arrivals,
            now=self._time.now,
        )
        lifecycle.arrive(request)

    def abort(
        self,
        client: Hashable,
        request_id: int,
        reason: EndReason = "abort",
        num_tokens: int | None = None,
    ) -> None:
        """End a request, waiting or running; harmless if it is unknown or over. Yields no output.

        `reason` and `num_tokens`, the tokens that its client was shown (None: all), are recorded.
        """
        request = self._requests.get(client, {}).get(request_id)
        if request is not None:
            self._time.tick()
            self._note_end(request, reason)
            if num_tokens is not None:
                request.num_output_tokens = num_tokens
            self._end(request)
            self._outputs.drop(request)

    def abort_client(self, client: Hashable) -> None:
        """End all requests of a client that is gone."""
        for request_id in list(self._requests.get(client, ())):
            self.abort(client, request_id)

    def end_calls(self, order: EndCalls) -> None:
        """End the requests that `order` concerns, each with an output that says why."""
        self._time.tick()
        requests = [request for of in self._requests.values() for request in of.values()]
        for request in requests:
            if order.concerns(request.message):
                self._fail(request, order.code, order.reason)

    # -- steps

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now; false if everything left waits for a load."""
        lifecycle = self._lifecycle
        waiting, slots, gate = lifecycle.waiting, lifecycle.slots, lifecycle.gate
        return bool(
            len(lifecycle.running)
            or len(self._outputs)
            or slots.has_notices
            or waiting.ready.min() is not None
            or waiting.resuming.min() is not None
            or (slots.has_spare and waiting.unplaced.min() is not None)
            or (gate.can_hasten and waiting.unfetched.min() is not None)
        )

    def schedule(self) -> ScheduledBatch:
        """Plan a step. If the batch has rows, compute and commit it before the next call."""
        self._time.tick()
        self._num_ahead = 0
        self._step_began = self._time.now
        self._plan = StepPlan(self._config.max_num_batched_tokens)
        self._lifecycle.waiting.stop_at(None, "turn")
        self._collect_debts()
        self._policy.fill(self._plan)
        return self._plan.batch(self._lifecycle.blocks, self._lifecycle.slots)

    def schedule_ahead(self) -> ScheduledBatch | None:
        """Plan the step after the running one before that is committed; None if it is too early.

        See `engine.scheduling.plan_ahead`. Commit both before the next call of `schedule`.
        """
        assert self._ahead is None, "a step is planned ahead already"
        self._time.tick()
        self._ahead = plan_ahead(self._plan, self._lifecycle, self._config, self._num_ahead)
        if self._ahead is None:
            return None
        self._num_ahead += 1
        self._lifecycle.gate.begin_step(is_idle=False)
        return ahead_batch(self._plan, self._ahead, self._config.block_size)

    def commit(self, result: StepResult) -> None:
        """Take in what the runner drew for the oldest batch that was not committed yet."""
        self._time.tick()
        self._num_steps += 1
        self._busy_ns += self._time.now - self._step_began
        self._plan.share_time(self._time.now - self._step_began)
        grants, num_fillers = self._plan.grants, len(self._plan.fillers)
        assert len(result.rows) == len(grants) + num_fillers, "one result for each row"
        # Fillers come last; what was drawn for them is dropped.
        for (sequence, num_tokens), drawn in zip(grants.items(), result.rows, strict=False):
            if drawn is not None and drawn.is_deferred:
                continue
            # It may have ended since it was planned, or with another row of its request just now.
            if sequence.is_running:
                sequence.num_computed += num_tokens
                self._lifecycle.publish(sequence)
                if drawn is not None:
                    self._take_row(sequence, drawn)
                elif sequence.num_computed < sequence.prefill_length:
                    sequence.request.note_change("prefill", self._time.now)
        if self._policy.keeps_finished and all(s.finished for s in self._lifecycle.running):
            for sequence in list(self._lifecycle.running):
                self._leave(sequence)
        if self._ahead is not None:
            self._plan, self._ahead = self._ahead, None
            self._step_began = self._time.now

    def take_outputs(self) -> list[tuple[Hashable, RequestOutput]]:
        """Outputs since the last call, by client: one message for each request."""
        return [(key.client, output) for key, output in self._outputs.take()]

    # -- adapters

    def adapter_fetched(self, digest: str) -> None:
        """An adapter's weights are in host memory: it may be given a slot."""
        self._time.tick()
        self._lifecycle.slots.fetched(digest)
        self._lifecycle.waiting.refile(digest)
        self._lifecycle.gate.settle()  # it may be pinned
        self._lifecycle.gate.place_early()

    def adapter_installed(self, digest: str) -> None:
        """The weights of a load are in their slot."""
        self._time.tick()
        self._lifecycle.slots.installed(digest)
        self._lifecycle.gate.loaded(digest)
        self._lifecycle.waiting.refile(digest)

    def adapter_failed(self, digest: str, reason: str) -> None:
        """An adapter cannot be had: requests that wait for it end, unless it is resident."""
        self._time.tick()
        lifecycle = self._lifecycle
        if lifecycle.slots.state(digest) is SlotState.RESIDENT:
            return
        lifecycle.slots.fail(digest)
        lifecycle.waiting.refile(digest)
        waiting = [s for queue in lifecycle.waiting.queues_of(digest) for s in queue.waiting]
        for request in dict.fromkeys(sequence.request for sequence in waiting):
            self._fail(request, "adapter_unavailable", reason)
        lifecycle.gate.settle()

    def unload(self, digest: str) -> None:
        """Forget an adapter, its slot and its prefixes, once nothing needs it."""
        self._time.tick()
        self._lifecycle.slots.unload(digest)
        self._lifecycle.gate.settle()

    def take_slot_changes(self) -> tuple[list[int], list[SlotLoad]]:
        """Slots to clear and loads to start now; what is not taken here is in the next batch."""
        return self._lifecycle.slots.take_changes()

    def pin(self, digests: frozenset[str]) -> None:
        """Replace the set of pinned adapters; raises `ValueError` if they are too many.

        A pinned adapter is loaded as soon as a slot is spare and its weights are in host memory
        (the caller has them fetched, see `needs_fetch`). It keeps its slot until it is unpinned.
        At least one slot is left to all others.
        """
        limit = max(0, self._config.max_loras - 1)
        if len(digests) > limit:
            raise ValueError(f"{len(digests)} adapters to pin; at most {limit} may be")
        self._time.tick()
        self._lifecycle.gate.pin(digests)

    def take_adapter_notices(self) -> AdapterNotices:
        """What the adapters' source is to be told, handed out once."""
        notices = self._lifecycle.slots.take_notices()
        for digest in notices.forgotten:
            self._lifecycle.blocks.forget_adapter(digest)
        return notices

    def needs_fetch(self, digest: str) -> bool:
        """Whether an adapter that is needed has neither a slot nor its weights in host memory."""
        adapter = self._lifecycle.slots.find(digest)
        return adapter is not None and adapter.slot is None and not adapter.is_fetched

    def loading_slot(self, digest: str) -> int | None:
        """The slot that waits for this adapter's weights, if one does."""
        adapter = self._lifecycle.slots.find(digest)
        if adapter is None or adapter.state is not SlotState.LOADING:
            return None
        return adapter.slot

    # -- what it looks like inside

    @property
    def resident(self) -> list[str]:
        """Digests that hold a slot, also while they are loaded or drained."""
        return [adapter.digest for adapter in self._lifecycle.slots.placed]

    def stats(self) -> EngineStats:
        """A snapshot, without the numbers about host memory, which the scheduler does not know."""
        return stats_of(
            self._lifecycle,
            steps=self._num_steps,
            output_tokens=self._num_output_tokens,
            busy_ns=self._busy_ns,
        )

    def load(self) -> EngineLoad:
        """How much is held and waited for, cheap enough to take in every step."""
        return load_of(self._lifecycle)

    def composition(self) -> Composition:
        """Whose rows are in the step that is committed next."""
        return composition_of(self._plan)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots, queues, sequences and requests disagree."""
        self._lifecycle.check_integrity()
        live = [request for requests in self._requests.values() for request in requests.values()]
        assert all(request.sequences for request in live), "a request without sequences"
        num_sequences = sum(len(request.sequences) for request in live)
        lifecycle = self._lifecycle
        assert num_sequences == len(lifecycle.running) + lifecycle.waiting.num_waiting
        assert lifecycle.running.num_seats <= self._config.max_num_seqs, "too many seats"

    # -- private

    def _collect_debts(self) -> None:
        gate = self._lifecycle.gate
        claim = gate.oldest_claim
        gate.begin_step(is_idle=claim is not None and self._is_idle_for(claim.head))
        while (digest := gate.due_victim()) is not None:
            victims = self._lifecycle.running.of_adapter(digest)
            stint = gate.stint(sum(map(self._lifecycle.num_lost_blocks, victims)))
            if not all(sequence.num_drawn >= stint for sequence in victims):
                return
            for sequence in victims:
                self._lifecycle.preempt(sequence)
                self._plan.preempted.append(sequence.sequence_id)

    def _is_idle_for(self, head: Sequence) -> bool:
        # With more seats taken, recomputing costs those that run more than the slot gains.
        has_seats = 2 * self._lifecycle.running.num_seats <= self._config.max_num_seqs
        return has_seats and not self._lifecycle.gate.is_crowded and self._lifecycle.has_room(head)

    def _take_row(self, sequence: Sequence, drawn: SampledRow) -> None:
        if drawn.error is not None:
            self._fail(sequence.request, drawn.error_code, drawn.error)
            return
        others = self._lifecycle.fork(sequence) if sequence.num_seats > 1 else []
        for choice, token in zip([sequence, *others], drawn.tokens, strict=True):
            self._take_token(choice, token)

    def _take_token(self, sequence: Sequence, token: SampledToken) -> None:
        request = sequence.request
        sequence.token_ids.append(token.token_id)
        request.note_token(self._time.now)
        self._num_output_tokens += 1
        self._lifecycle.charge(request.queue, self._config.output_weight)
        finish_reason = sequence.finish_reason(self._eos_token_ids, self._max_sequence_len)
        self._outputs.token(sequence, token, finish_reason)
        if finish_reason is not None:
            request.end_reasons.append(finish_reason)
            sequence.finished = True
            if not (self._policy.keeps_finished and sequence.is_running):
                self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._lifecycle.end(sequence)
        if not sequence.request.sequences:
            self._forget(sequence.request)
            self._outputs.over(sequence.request)

    def _fail(self, request: Request, code: str, reason: str) -> None:
        unfinished = [s for s in request.sequences if not s.finished]
        choices = [choice for sequence in unfinished for choice in sequence.choices]
        self._outputs.failed(request, choices, code, reason)
        self._note_end(request, "error")
        request.error_code = code
        self._end(request)
        self._outputs.over(request)

    def _end(self, request: Request) -> None:
        for sequence in list(request.sequences):
            self._lifecycle.end(sequence)
        self._forget(request)

    def _note_end(self, request: Request, reason: EndReason) -> None:
        for sequence in request.sequences:
            if not sequence.finished:
                request.end_reasons.extend(reason for _ in sequence.choices)

    def _forget(self, request: Request) -> None:
        if self._observer is not None:
            self._observer.request_over(request, self._time.now)
        requests = self._requests[request.key.client]
        del requests[request.key.request_id]
        if not requests:
            del self._requests[request.key.client]
