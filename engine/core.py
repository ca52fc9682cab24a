"""One step of the engine: joins scheduler, runner and adapters, without a process around them.

Single-threaded and free of torch. `engine.transport.server` calls it from the engine's own process,
`engine.transport.inline_client` from a test's event loop.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from engine.adapters.source import AdapterEvent, AdapterReady, AdapterSource
from engine.config import SchedulerConfig
from engine.engine_stats import EngineStats
from engine.errors import AdapterUnavailable, RequestRefused
from engine.messages import EndCalls, EngineRequest, RequestOutput
from engine.runner.protocol import Launch, Runner, RunningStep, Transfer
from engine.scheduled_batch import ScheduledBatch, SlotLoad, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.journal import Journal
from engine.telemetry.records import EndReason
from engine.telemetry.step_split import split_step

ClientOutput = tuple[Hashable, RequestOutput]


class EngineCore:
    """Owns the scheduler; knows the runner, the adapter source and the clock only by protocol."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        adapters: AdapterSource,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        clock: Callable[[], float],
        prepare_grammar: Callable[[str, str], None] | None = None,
        launch: Launch | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Optional parts:

        - `prepare_grammar(grammar, tenant)` begins to compile a grammar. Without it, requests that
          have one are refused.
        - `launch` is the method of an `OverlappingRunner`. With it, a step is planned and outputs
          are sent while the step before runs; without it, steps run one after another.
        - `journal` is told of everything that happens; it must use the same clock.
        """
        self._scheduler = Scheduler(
            config,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            clock=clock,
            observer=journal,
        )
        self._clock = clock
        self._journal = journal
        self._runner = runner
        self._adapters = adapters
        self._prepare_grammar = prepare_grammar
        self._launch = launch
        self._flight: RunningStep | None = None
        """The step that runs between two calls of `step`."""
        self._events: list[AdapterEvent] = []
        """Adapter events that came while a step ran."""
        self._transfers: dict[str, tuple[int, Transfer]] = {}
        """Adapters on their way to a slot."""

    def add(self, client: Hashable, request: EngineRequest) -> None:
        """Queue a request; raises `RequestRefused`. Its adapter begins to be fetched at once."""
        if self._journal is None:
            self._add(client, request)
            return
        self._journal.asked(request)
        try:
            self._add(client, request)
        except RequestRefused as refusal:
            self._journal.refused(request, refusal.code)
            raise

    def _add(self, client: Hashable, request: EngineRequest) -> None:
        grammar = request.sampling.grammar
        if grammar is not None and self._prepare_grammar is None:
            raise RequestRefused(
                "structured_output_unavailable",
                "the engine has no tokenizer whose tokens it could check against a grammar",
                param="response_format",
            )
        self._scheduler.add(client, request)
        if grammar is not None and self._prepare_grammar is not None:
            self._prepare_grammar(grammar, request.tenant)
        if request.adapter is not None and self._scheduler.needs_fetch(request.adapter):
            self._adapters.prefetch(request.adapter)

    def abort(
        self,
        client: Hashable,
        request_id: int,
        reason: EndReason = "abort",
        num_tokens: int | None = None,
    ) -> None:
        """End a request; harmless if it is unknown or over. Yields no output.

        `reason` and `num_tokens` are only recorded; see `engine.messages.Abort`.
        """
        self._scheduler.abort(client, request_id, reason, num_tokens)

    def abort_client(self, client: Hashable) -> None:
        """End all requests of a client that is gone."""
        self._scheduler.abort_client(client)

    def end_calls(self, order: EndCalls) -> None:
        """End the requests that `order` concerns, of any client."""
        self._scheduler.end_calls(order)

    def pin(self, digests: frozenset[str]) -> None:
        """Replace the set of pinned adapters, see `Scheduler.pin`; they begin to be fetched."""
        self._scheduler.pin(digests)
        for digest in sorted(digests):
            if self._scheduler.needs_fetch(digest):
                self._adapters.prefetch(digest)

    def unload(self, digest: str) -> None:
        """Drop an adapter once nothing needs it."""
        self._scheduler.unload(digest)

    def step(self) -> list[ClientOutput]:
        """One iteration, adapter events included; [] if nothing could run."""
        began = self._clock()
        if self._launch is not None:
            self._step_overlapped(self._launch, began)
        elif (batch := self._plan_step()).rows:
            planned = self._clock()
            self._commit(self._runner.execute(batch), began, planned)
        return self._scheduler.take_outputs()

    def _step_overlapped(self, launch: Launch, began: float) -> None:
        if self._flight is None:
            batch = self._plan_step()
            if not batch.rows:
                return
            self._flight = launch(batch)
        following: RunningStep | None = None
        self._events += self._adapters.poll()
        # What came is for a step that plans anew, and slots are changed while none runs.
        has_news = bool(self._events) or any(t.is_done() for _, t in self._transfers.values())
        if not has_news and (ahead := self._scheduler.schedule_ahead()) is not None:
            following = launch(ahead)
        planned = self._clock()
        self._commit(self._flight.result(), began, planned)
        self._flight = following

    def _commit(self, result: StepResult, began: float, planned: float) -> None:
        journal = self._journal
        if journal is None:
            self._scheduler.commit(result)
            return
        ran = self._clock()
        composition = self._scheduler.composition()  # before it changes
        self._scheduler.commit(result)
        seconds = split_step(planned - began, ran - planned, self._clock() - ran, result.seconds)
        journal.step(began, seconds, composition, self._scheduler.load())

    def _plan_step(self) -> ScheduledBatch:
        """Take in what has arrived, plan a step and change the slots; no rows if none can run."""
        self._take_transfers()
        self._take_adapter_events()
        # Fill slots that were given away since the last step first: then rows that use them can be
        # in this batch already.
        self._change_slots(*self._scheduler.take_slot_changes())
        batch = self._scheduler.schedule()
        self._tell_source()
        self._change_slots(batch.cleared_slots, batch.loads)
        # The slots are changed by now. If the runner cleared them again, it would remove what was
        # installed since, and answers of the base would pass for the adapter's.
        return replace(batch, cleared_slots=[], loads=[])

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now; false if everything left waits for a load.

        If it is false, sleep until a message or an adapter event comes, then call `step`.
        """
        return bool(self._flight or self._transfers) or self._scheduler.has_work

    @property
    def resident(self) -> list[str]:
        """Digests that hold a slot; see `Scheduler.resident`."""
        return self._scheduler.resident

    def stats(self) -> EngineStats:
        """A snapshot, without the numbers about host memory; `EngineParts.stats` adds them."""
        return self._scheduler.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots, queues and sequences disagree."""
        self._scheduler.check_integrity()

    def _take_adapter_events(self) -> None:
        events, self._events = [*self._events, *self._adapters.poll()], []
        for event in events:
            # Clear what has left a slot before another adapter comes into it. Clearing afterwards
            # would remove the newcomer's weights, and answers of the base would pass for its own.
            self._change_slots(*self._scheduler.take_slot_changes())
            if isinstance(event, AdapterReady) and self._journal is not None:
                self._journal.fetched(event.digest, event.seconds)
            if not isinstance(event, AdapterReady):
                self._scheduler.adapter_failed(event.digest, event.reason)
            elif (slot := self._scheduler.loading_slot(event.digest)) is not None:
                if event.digest not in self._transfers:
                    self._install(slot, event.digest)
            else:
                self._scheduler.adapter_fetched(event.digest)

    def _tell_source(self) -> None:
        notices = self._scheduler.take_adapter_notices()
        for digest in notices.released:
            self._adapters.release(digest)
        for digest in notices.forgotten:
            self._adapters.forget(digest)
        for digest in notices.hastened:
            self._adapters.prefetch(digest)
            self._adapters.hasten(digest)
            if self._adapters.get(digest) is not None:
                self._scheduler.adapter_fetched(digest)

    def _change_slots(self, cleared: Iterable[int], loads: Iterable[SlotLoad]) -> None:
        for slot in cleared:
            self._runner.clear_slot(slot)
        for slot, digest in loads:
            self._install(slot, digest)

    def _install(self, slot: int, digest: str) -> None:
        weights: Any | None = self._adapters.get(digest)
        if weights is None:
            # Evicted from host memory since it was fetched: the slot waits for it.
            self._adapters.prefetch(digest)
            self._adapters.hasten(digest)
            return
        try:
            transfer = self._runner.install_adapter(slot, weights)
        except Exception as error:  # whatever is wrong with an adapter ends its requests only
            if not isinstance(error, AdapterUnavailable):
                log = structlog.get_logger("engine.core")
                log.exception("adapter_not_installed", adapter=digest[:12])
            self._scheduler.adapter_failed(digest, str(error) or type(error).__name__)
        else:
            if transfer is None:
                self._scheduler.adapter_installed(digest)
            else:
                self._transfers[digest] = slot, transfer

    def _take_transfers(self) -> None:
        done = [digest for digest, (_, t) in self._transfers.items() if t.is_done()]
        for digest in done:
            slot, transfer = self._transfers.pop(digest)
            if self._scheduler.loading_slot(digest) != slot:
                continue  # called off; whoever has the slot now is written behind it
            error = transfer.error()
            if error is None:
                self._scheduler.adapter_installed(digest)
            else:
                self._scheduler.adapter_failed(digest, error)
