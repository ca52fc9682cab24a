"""The engine's step loop without its process: scheduler, runner and adapters joined.

Single-threaded and free of torch. `engine.server` calls it from the engine's own process,
`engine.inline_client` from a test's event loop.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.adapter_source import AdapterReady, AdapterSource, Runner
from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.messages import EndCalls, EngineRequest, EngineStats, RequestOutput
from engine.scheduled_batch import SlotLoad
from engine.scheduler import Scheduler

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
        prepare_grammar: Callable[[str], None] | None = None,
    ) -> None:
        """`prepare_grammar` begins to compile; without it requests with a grammar are refused."""
        self._scheduler = Scheduler(
            config, eos_token_ids=eos_token_ids, vocab_size=vocab_size, clock=clock
        )
        self._runner = runner
        self._adapters = adapters
        self._prepare_grammar = prepare_grammar

    def add(self, client: Hashable, request: EngineRequest) -> None:
        """Queue a request; raises `RequestRefused`. Its adapter begins to be fetched at once."""
        grammar = request.sampling.grammar
        if grammar is not None and self._prepare_grammar is None:
            raise RequestRefused(
                "structured_output_unavailable",
                "the engine has no tokenizer whose tokens it could check against a grammar",
                param="response_format",
            )
        self._scheduler.add(client, request)
        if grammar is not None and self._prepare_grammar is not None:
            self._prepare_grammar(grammar)
        if request.adapter is not None and self._scheduler.needs_fetch(request.adapter):
            self._adapters.prefetch(request.adapter)

    def abort(self, client: Hashable, request_id: int) -> None:
        """End a request; harmless if it is unknown or over. Yields no output."""
        self._scheduler.abort(client, request_id)

    def abort_client(self, client: Hashable) -> None:
        """End all requests of a client that is gone."""
        self._scheduler.abort_client(client)

    def end_calls(self, order: EndCalls) -> None:
        """End the requests that the order concerns, whichever client's."""
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
        self._take_adapter_events()
        # Slots that were given away by now are filled first: their rows can be in this very batch.
        self._change_slots(*self._scheduler.take_slot_changes())
        batch = self._scheduler.schedule()
        self._tell_source()
        self._change_slots(batch.cleared_slots, batch.loads)
        if batch.rows:
            # The slots are changed by now. A runner that cleared them (again) would take away what
            # was installed in the meantime, and base answers would pass for the adapter's.
            batch = replace(batch, cleared_slots=[], loads=[])
            self._scheduler.commit(self._runner.execute(batch))
        return self._scheduler.take_outputs()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now: false if all that is left waits for a load.

        Then sleep until a message or an adapter event comes, and call `step`.
        """
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        """A snapshot; `host_adapters` and `host_adapter_bytes` are the source's owner's to add."""
        return self._scheduler.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots, queues and sequences disagree."""
        self._scheduler.check_integrity()

    def _take_adapter_events(self) -> None:
        for event in self._adapters.poll():
            if not isinstance(event, AdapterReady):
                self._scheduler.adapter_failed(event.digest, event.reason)
            elif (slot := self._scheduler.loading_slot(event.digest)) is not None:
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
            self._adapters.get(digest)
            return
        try:
            self._runner.install_adapter(slot, weights)
        except Exception as error:  # whatever is wrong with an adapter ends its requests only
            self._scheduler.adapter_failed(digest, str(error) or type(error).__name__)
        else:
            self._scheduler.adapter_installed(digest)
