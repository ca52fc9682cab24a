"""Records what the engine does, in the engine's own process, for whoever asks.

It runs on the step loop: a step costs it a few microseconds, a request a few tens. It keeps the
last few thousand records of each kind, and sums of everything, and never waits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.messages import EngineRequest
from engine.scheduling.request import Request
from engine.scheduling.step_report import Composition, EngineLoad
from engine.telemetry.adapter_table import AdapterTable
from engine.telemetry.adapter_totals import add_request
from engine.telemetry.labels import name_of
from engine.telemetry.owners import MAX_OWNERS, Owners
from engine.telemetry.records import (
    AdapterOwner,
    Cursor,
    EngineTotals,
    GetTelemetry,
    Objective,
    RequestRecord,
    SlotEvent,
    SlotEventKind,
    StepRecord,
    StepSeconds,
    Telemetry,
)
from engine.telemetry.request_records import record_of
from engine.telemetry.residence import Fetch, Residence
from engine.telemetry.ring import Ring
from engine.telemetry.step_totals import StepTotals, shares_of


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """What is kept, and what counts as good."""

    objective: Objective = field(default_factory=Objective)
    max_adapters: int = 50
    """Adapters with totals of their own."""
    num_requests: int = 4096
    """Records of each kind that are kept."""
    num_steps: int = 4096
    num_slot_events: int = 4096


class Journal:
    """An `engine.telemetry.observer.Observer`; belongs to one thread."""

    def __init__(
        self,
        config: JournalConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is the scheduler's."""
        self._config = config or JournalConfig()
        self._clock = clock
        self._wall_clock = wall_clock
        self._offset = wall_clock() - clock()  # from the scheduler's time to Unix time
        self._started = wall_clock()
        self._requests = Ring[RequestRecord](self._config.num_requests)
        self._steps = Ring[StepRecord](self._config.num_steps)
        self._slot_events = Ring[SlotEvent](self._config.num_slot_events)
        self._table = AdapterTable(self._config.max_adapters, clock())
        self._owners = Owners()
        self._residences: dict[str, Residence] = {}
        self._fetches: dict[str, Fetch] = {}
        """How adapters came to host memory, until they are in a slot."""
        self._step_totals = StepTotals()
        self._num_preemptions = 0

    # -- requests

    def asked(self, message: EngineRequest) -> None:
        """A request arrived: remember whose its adapter is."""
        digest = message.adapter
        if digest is None:
            return
        owner = AdapterOwner(message.tenant, message.label)
        self._owners.note(digest, owner)
        residence = self._residences.get(digest)
        if residence is None or owner in residence.owners or len(residence.owners) >= MAX_OWNERS:
            return
        now = round(self._clock() * 1e9)
        residence.share(owner, now, self._table)
        self._tell_slot("shared", digest, residence.slot, residence.owners, now)

    def refused(self, message: EngineRequest, code: str) -> None:
        """A request was not queued."""
        self.note_refusals(message.tenant, _name(message), code, 1)

    def note_refusals(self, tenant: str, adapter: str | None, code: str, number: int) -> None:
        """Requests were not queued, here or in the service."""
        totals = self._table.refusals_of(tenant, adapter, self._clock())
        totals.refused[code] = totals.refused.get(code, 0) + number

    def admitted(self, request: Request, now: int) -> None:
        """A sequence of the request begins to run: note if its adapter was loaded meanwhile."""
        residence = self._residences.get(request.message.adapter or "")
        if residence is None or residence.resident_at is None:
            return
        since = request.changes[-1][0]
        if since < residence.resident_at:
            request.note_change("loaded", min(residence.resident_at, now))
            request.load_ns += residence.load_ns

    def request_over(self, request: Request, now: int) -> None:
        """A request has ended, however."""
        record = record_of(request, now, self._offset)
        self._requests.push(record)
        num_tokens = record.prompt_tokens + record.output_tokens
        totals = self._table.note_traffic(
            record.tenant, record.adapter, num_tokens, request.arrived / 1e9, now / 1e9
        )
        add_request(totals, record, self._config.objective)

    # -- slots

    def fetched(self, digest: str, seconds: float) -> None:
        """An adapter has come to host memory; 0: it was there."""
        if seconds:
            self._fetches[digest] = Fetch(round(seconds * 1e9), round(self._clock() * 1e9))
            if len(self._fetches) > self._config.num_slot_events:
                del self._fetches[next(iter(self._fetches))]

    def slot_changed(self, kind: SlotEventKind, digest: str, slot: int | None) -> None:
        """An adapter's state changed, on its way into a slot or out of it."""
        now = round(self._clock() * 1e9)
        residence = self._residences.get(digest)
        owners = self._owners.of(digest) if residence is None else residence.owners
        self._tell_slot(kind, digest, slot, owners, now)
        match kind:
            case "loading":
                assert slot is not None
                self._residences[digest] = Residence(now, slot, owners)
            case "resident":
                residence = self._residences[digest]
                if residence.resident_at is None:
                    residence.arrive(now, self._fetches.pop(digest, None), self._table)
            case "evicted":
                self._residences.pop(digest).settle(now, self._table)
            case _:
                pass

    def _tell_slot(
        self,
        kind: SlotEventKind,
        digest: str,
        slot: int | None,
        owners: tuple[AdapterOwner, ...],
        now: int,
    ) -> None:
        at = now / 1e9 + self._offset
        self._slot_events.push(SlotEvent(at=at, slot=slot, digest=digest, owners=owners, kind=kind))

    def forget(self, tenant: str, adapter: str | None = None) -> None:
        """An adapter, or a whole tenant, was deleted: it has no totals of its own any more."""
        self._table.forget(tenant, adapter, self._clock())
        self._owners.forget(tenant, adapter)
        for residence in self._residences.values():
            residence.forget(tenant, adapter)

    # -- steps

    def step(
        self, began: float, seconds: StepSeconds, composition: Composition, load: EngineLoad
    ) -> None:
        """A step is over; `began` by the scheduler's clock."""
        num_preemptions = load.preemptions - self._num_preemptions
        self._num_preemptions = load.preemptions
        record = StepRecord(
            at=began + self._offset,
            number=self._step_totals.count + 1,
            seconds=seconds,
            shares=shares_of(composition),
            adapters=sum(label is not None for _, label in composition),
            running=load.running,
            waiting=load.waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
            slots_used=load.slots_used,
            slots_total=load.slots_total,
            preemptions=num_preemptions,
        )
        self._steps.push(record)
        self._step_totals.add(record)

    # -- readers

    def telemetry(self, question: GetTelemetry, generation: int) -> Telemetry:
        """What is new since the reader's cursor."""
        self._offset = self._wall_clock() - self._clock()
        cursor = question.cursor
        if cursor.generation != generation:
            cursor = Cursor()
        limit = max(1, question.limit)
        requests = self._requests.read(cursor.requests, limit)
        steps = self._steps.read(cursor.steps, limit)
        slot_events = self._slot_events.read(cursor.slot_events, limit)
        is_first = cursor == Cursor()
        return Telemetry(
            generation=generation,
            call_id=question.call_id,
            cursor=Cursor(generation, requests.position, steps.position, slot_events.position),
            requests=requests.records,
            steps=steps.records,
            slot_events=slot_events.records,
            missed=0 if is_first else requests.missed + steps.missed + slot_events.missed,
            has_more=requests.has_more or steps.has_more or slot_events.has_more,
            totals=self._totals() if question.with_totals else None,
        )

    def _totals(self) -> EngineTotals:
        now = self._clock()
        for residence in self._residences.values():
            residence.settle(round(now * 1e9), self._table)
        self._table.review(now)
        return self._step_totals.totals(self._started, self._config.objective, self._table.all())


def _name(message: EngineRequest) -> str | None:
    return None if message.adapter is None else name_of(message.label)
