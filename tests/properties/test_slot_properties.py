"""Adapter slots, their gate and admission, driven move by move and not step by step.

Arrivals, loads, failures, unloads, preemptions and ends come in any order, between any two of the
scheduler's moves. `device` is what a runner would hold in its slots if it did as it was told.
"""

from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.config import SchedulerConfig
from engine.scheduling.adapter_slots import SlotState
from engine.scheduling.admission import Admission
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.request import Request, RequestKey
from engine.scheduling.sequence import SequenceState
from engine.scheduling.step_clock import StepClock
from tests.support.memory_engine import FakeClock, request

SETTINGS = settings(
    max_examples=50,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
ADAPTERS = [f"adapter-{letter}" for letter in "abcdefghijkl"]
TENANTS = ["t0", "t1", "t2", "t3"]


class SlotMachine(RuleBasedStateMachine):
    happened: Counter[str]

    @initialize(
        max_loras=st.sampled_from([1, 1, 2, 3, 8]),
        seats=st.integers(1, 6),
        debt=st.integers(0, 20),
        max_slots=st.lists(
            st.sampled_from([None, None, 1, 1, 2]), min_size=len(TENANTS), max_size=len(TENANTS)
        ),
    )
    def start(self, *, max_loras, seats, debt, max_slots):
        self.max_slots = dict(zip(TENANTS, max_slots, strict=True))
        config = SchedulerConfig(
            num_kv_blocks=40, block_size=4, max_num_seqs=seats, max_num_batched_tokens=32,
            max_loras=max_loras, slot_debt_tokens=debt,
        )  # fmt: skip
        self.clock = FakeClock()
        self.time = StepClock(self.clock)
        self.lifecycle = Lifecycle(config, self.time)
        self.admission = Admission(self.lifecycle, config)
        self.slots, self.gate = self.lifecycle.slots, self.lifecycle.gate
        self.num_requests = 0
        self.device: dict[int, str] = {}
        self.in_host: set[str] = set()
        self.loading: dict[str, int] = {}

    @rule(
        tenant=st.sampled_from(TENANTS),
        adapter=st.sampled_from([None, *ADAPTERS]),
        is_in_host=st.booleans(),
        max_concurrent=st.sampled_from([None, None, 1, 2]),
    )
    def arrive(self, **fields):
        self._arrive(**fields)

    @rule(
        tenants=st.lists(st.sampled_from(TENANTS), min_size=4, max_size=4),
        adapters=st.lists(st.sampled_from(ADAPTERS), min_size=4, max_size=4),
        broken=st.sampled_from([None, *ADAPTERS]),
        num_each=st.integers(1, 3),
    )
    def crowd(self, tenants, adapters, broken, num_each):
        for tenant, adapter in zip(tenants, adapters, strict=True):
            for _ in range(num_each):
                self._arrive(tenant=tenant, adapter=adapter, is_in_host=True)
            self.admit(9)
            self.runner_changes_slots()
            for digest in self._loads_due():
                self._load_ends(digest, fails=digest == broken)
            self.admit(9)

    def _arrive(self, *, adapter, is_in_host, **fields):
        self._tick()
        self.num_requests += 1
        message = request(
            self.num_requests, [1, 2, 3], adapter=adapter, max_tokens=20,
            max_slots=self.max_slots[fields["tenant"]], **fields,
        )  # fmt: skip
        queue = self.lifecycle.waiting.queue_of(message)
        key = RequestKey("c", self.num_requests)
        self.lifecycle.arrive(Request(key, message, queue, arrival_number=self.num_requests))
        if adapter is not None and is_in_host:
            self._fetched(adapter)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def fetched(self, adapter):
        self._tick()
        self._fetched(adapter)

    @rule(count=st.integers(1, 4))
    def admit(self, count):
        """As a step does, which stops at the first head that lacks something."""
        self._tick()
        self.lifecycle.waiting.stop_at(None, "turn")
        for _ in range(count):
            queue = self.admission.next_queue()
            if queue is None:
                return
            head, was_reserved = queue.head, self.gate.is_reserved(queue)
            if queue.adapter is not None:
                assert self.slots.state(queue.adapter) is SlotState.RESIDENT
            if self.admission.admit(queue) is None:
                return
            assert head.is_running
            if queue.adapter is not None:
                assert self.device.get(head.slot) == queue.adapter, "admitted before its weights"
            self.happened["reserved head"] += was_reserved

    @rule()
    def runner_changes_slots(self):
        """The step's slot changes reach the runner; loads begin."""
        cleared, loads = self.slots.take_changes()
        for slot in cleared:
            self.device.pop(slot, None)
        for load in loads:
            assert load.slot not in self.device, "a slot is loaded over another adapter"
            self.loading[load.digest] = load.slot
        self.happened["evicted"] += bool(cleared)

    @precondition(lambda self: self._loads_due())
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def load_ends(self, data, fails):
        self._tick()
        self._load_ends(data.draw(st.sampled_from(self._loads_due())), fails)

    def _load_ends(self, digest, fails=False):
        slot = self.loading.pop(digest)
        if fails:
            self.slots.fail(digest)
            self.lifecycle.waiting.refile(digest)
            self._end([s for q in self.lifecycle.waiting.queues_of(digest) for s in q.waiting])
            self.gate.settle()
            self.happened["load failed"] += 1
        else:
            self.device[slot] = digest
            self.slots.installed(digest)
            self.lifecycle.waiting.refile(digest)

    @rule(num_tokens=st.integers(1, 20), data=st.data())
    def serve(self, num_tokens, data):
        running = list(self.lifecycle.running)
        if running:
            self._tick()
            sequence = data.draw(st.sampled_from(running))
            self.lifecycle.charge(sequence.request.queue, num_tokens)

        self._collect_debts()

    def _collect_debts(self):
        self._tick()
        while (digest := self.gate.due_victim()) is not None:
            victims = self.lifecycle.running.of_adapter(digest)
            assert victims, "a victim that nobody runs keeps its slot"
            for sequence in victims:
                self.lifecycle.preempt(sequence)
                self.happened["preempted for a slot"] += 1

    @rule(data=st.data(), reasons=st.lists(st.booleans(), min_size=1, max_size=3))
    def preempt(self, data, reasons):
        """One or more sequences of a queue, each for its blocks or for the slot."""
        running = list(self.lifecycle.running)
        if running:
            self._tick()
            queue = data.draw(st.sampled_from(running)).request.queue
            victims = [s for s in running if s.request.queue is queue]
            for victim, for_blocks in zip(victims, reasons, strict=False):
                self.lifecycle.preempt(victim, for_blocks=for_blocks)
                self.happened["preempted for blocks" if for_blocks else "preempted"] += 1

    @rule(data=st.data())
    def end(self, data):
        alive = self._alive()
        if alive:
            self._tick()
            self._end([data.draw(st.sampled_from(alive))])

    @rule(digest=st.sampled_from(ADAPTERS))
    def unload(self, digest):
        self._tick()
        self.slots.unload(digest)
        self.gate.settle()

    @rule()
    def tell_source(self):
        notices = self.slots.take_notices()
        wanted = {s.request.message.adapter for s in self._alive()}
        assert not wanted & {*notices.released, *notices.forgotten}, "somebody wants it"
        self.in_host -= {*notices.released, *notices.forgotten}
        self.happened["hastened"] += bool(notices.hastened)
        self.happened["forgotten"] += bool(notices.forgotten)
        for digest in notices.hastened:
            self._fetched(digest)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "lifecycle"):
            return
        self.lifecycle.check_integrity()
        placed = self.slots.placed
        assert len(placed) <= self.slots.num_slots
        for adapter in placed:
            if adapter.state is not SlotState.LOADING:
                assert self.device[adapter.slot] == adapter.digest, "resident, but not there"
        for sequence in self.lifecycle.running:
            if sequence.slot is not None:
                assert self.device[sequence.slot] == sequence.request.message.adapter
        for tenant in self.lifecycle.waiting.tenants.values():
            self._check_slot_quota(tenant)
        self.happened["draining"] += any(a.state is SlotState.DRAINING for a in placed)

    def _check_slot_quota(self, tenant):
        queues = tenant.queues.values()
        on_slots = {q.adapter for q in queues if q.num_running} - {None}
        assert tenant.num_slots == len(on_slots)
        if tenant.reserved is not None:
            on_slots.add(tenant.reserved.adapter)
        if tenant.max_slots is None:
            assert not tenant.is_out_of_slots
            return
        assert len(on_slots) <= tenant.max_slots, "more slots than its quota"
        for queue in queues:
            is_out = tenant.is_out_of_slots and queue.adapter not in {None, *on_slots}
            assert not (is_out and queue) or queue.cause == "quota", queue.cause
            self.happened["kept out"] += bool(is_out and queue)
            self.happened["yielding"] += tenant.is_out_of_slots and queue.is_yielding

    def teardown(self):
        """With time and weights everything is served, and nothing is left."""
        if not hasattr(self, "lifecycle"):
            return
        for _ in range(20 * (1 + len(self._alive()))):
            for digest in {s.request.message.adapter for s in self._alive()} - {None}:
                self._fetched(digest)
            self._collect_debts()
            self.admit(99)
            self.runner_changes_slots()
            for digest in self._loads_due():
                self._load_ends(digest)
            for sequence in list(self.lifecycle.running):
                self._end([sequence])
            self.tell_source()
            self.books_balance()
            if not self._alive():
                break
        assert not self._alive(), "somebody waits for ever"
        for digest in ADAPTERS:
            self.unload(digest)
        self.runner_changes_slots()
        self.tell_source()
        self.books_balance()
        assert not self.slots.placed and not self.device
        assert not self.slots.has_notices

    def _tick(self):
        self.clock.now += 0.1
        self.time.tick()

    def _fetched(self, digest):
        self.in_host.add(digest)
        self.slots.fetched(digest)
        self.lifecycle.waiting.refile(digest)

    def _loads_due(self):
        """Loads that were not called off meanwhile."""
        for digest, slot in list(self.loading.items()):
            adapter = self.slots.find(digest)
            if adapter is None or adapter.state is not SlotState.LOADING or adapter.slot != slot:
                del self.loading[digest]
        return list(self.loading)

    def _alive(self):
        queues = [q for t in self.lifecycle.waiting.tenants.values() for q in t.queues.values()]
        return [*self.lifecycle.running, *(s for queue in queues for s in queue.waiting)]

    def _end(self, sequences):
        for sequence in sequences:
            assert sequence.state is not SequenceState.ENDED
            self.lifecycle.end(sequence)


def test_slots_are_given_kept_and_taken_back_rightly_whatever_comes_between():
    class Machine(SlotMachine):
        happened: ClassVar = Counter[str]()

    run_state_machine_as_test(Machine, settings=SETTINGS)
    for event in (
        "reserved head", "evicted", "load failed", "preempted for a slot", "preempted",
        "preempted for blocks", "hastened", "forgotten", "draining", "kept out", "yielding",
    ):  # fmt: skip
        assert Machine.happened[event] > 0, (event, Machine.happened)
