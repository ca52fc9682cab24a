"""Whatever happens to the engine, in any order: books balance and every answer is right."""

import os

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

from tests.support.memory_engine import FakeSource, MemoryEngine, request
from tests.support.memory_runner import Overlap

ADAPTERS = ["adapter-a", "adapter-b", "adapter-c", "adapter-d"]
# Few prompts that share prefixes, so that the prefix cache is hit.
PROMPTS = [[1, 2, 3, 4] * 5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 2, [9] * 20]

SETTINGS = settings(
    max_examples=int(os.environ.get("LORAPLEX_TEST_EXAMPLES", "40")),
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class EngineMachine(RuleBasedStateMachine):
    policy = "chunked"
    overlap: Overlap | None = None

    @initialize(
        num_kv_blocks=st.integers(5, 24),
        max_num_seqs=st.integers(2, 5),
        spare_tokens=st.integers(0, 30),
        max_loras=st.integers(1, 4),
        slot_debt_tokens=st.sampled_from([0, 20, None]),
        enable_prefix_cache=st.booleans(),
        attention_context=st.sampled_from([None, 1, 8]),
        auto=st.booleans(),
        capacity=st.integers(0, 3),
    )
    def start(self, *, max_num_seqs, spare_tokens, auto, capacity, **config):
        self.next_id = 0
        self.aborted: set[int] = set()
        self.pinned: frozenset[str] = frozenset()
        self.settled: frozenset[str] = frozenset()
        """Pinned adapters that were seen in a slot."""
        self.engine = MemoryEngine(
            source=FakeSource(auto=auto, capacity=capacity),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_model_len=48,
            policy=self.policy,
            overlap=self.overlap,
            **config,
        )

    @rule(
        tenant=st.sampled_from(["t0", "t1", "t2"]),
        adapter=st.sampled_from([None, *ADAPTERS]),
        prompt=st.integers(0, 2),
        length=st.integers(1, 19),
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        ignore_eos=st.booleans(),
        max_concurrent=st.sampled_from([None, None, 3, 4]),
        weight=st.sampled_from([1.0, 2.0]),
        client=st.sampled_from(["c0", "c1"]),
    )
    def add(self, *, prompt, length, n, client, **fields):
        self.next_id += 1
        n = min(n, self.engine.config.max_num_seqs)
        self.engine.add(request(self.next_id, PROMPTS[prompt][:length], n=n, **fields), client)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule(data=st.data(), twice=st.booleans())
    def abort(self, data, twice):
        live = self._live()
        if live:
            client, request_id = data.draw(st.sampled_from(live))
            for _ in range(1 + twice):
                self.engine.core.abort(client, request_id)
            self._note_aborted([(client, request_id)])

    @rule(client=st.sampled_from(["c0", "c1", "nobody"]))
    def abort_client(self, client):
        self.engine.core.abort_client(client)
        self._note_aborted([key for key in self._live() if key[0] == client])

    @precondition(lambda self: self.engine.source.pending)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def load_ends(self, data, fails):
        digest = data.draw(st.sampled_from(list(self.engine.source.pending)))
        if fails:
            self.engine.source.fail(digest)
        else:
            self.engine.source.deliver(digest)

    @rule(digest=st.sampled_from(ADAPTERS))
    def unload(self, digest):
        self.engine.core.unload(digest)

    @rule(digests=st.frozensets(st.sampled_from(ADAPTERS), max_size=3))
    def pin(self, digests):
        pinned = frozenset(sorted(digests)[: self.engine.config.max_loras - 1])
        self.engine.core.pin(pinned)
        self.pinned = pinned
        self.settled &= pinned

    @rule(digest=st.sampled_from(ADAPTERS), is_broken=st.booleans())
    def break_adapter(self, digest, is_broken):
        """A load that reaches the device and fails there."""
        broken = self.engine.runner.broken_adapters
        broken.add(digest) if is_broken else broken.discard(digest)

    @rule(data=st.data())
    def sampling_fails(self, data):
        live = self._live()
        if live:
            self.engine.runner.failing_requests.add(data.draw(st.sampled_from(live))[1])

    @invariant()
    def books_balance(self):
        self.engine.core.check_integrity()
        assert len(self.engine.runner.slots) <= self.engine.config.max_loras
        in_slots = set(self.engine.core.stats().resident)
        assert self.settled <= in_slots, "a pinned adapter lost its slot"
        self.settled = self.pinned & in_slots

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        source = self.engine.source
        source.auto = True
        self.engine.core.pin(frozenset())
        for digest in list(source.pending):
            source.deliver(digest)
        self.engine.run()
        self.engine.assert_at_rest()
        for client, request_id in self.engine.messages:
            if request_id not in self.aborted:
                self._check_ended(client, request_id)

    def _check_ended(self, client, request_id):
        output = self.engine.last(request_id, client)
        if output.error is None:
            self.engine.assert_as_alone(request_id, client)
        else:
            assert output.error_code in {"adapter_unavailable", "sampling_failed"}
        assert all(seconds > 0 for seconds in output.timing.queue.values())
        message = self.engine.messages[client, request_id]
        if message.sampling.n == 1 and not output.timing.preemptions and output.error is None:
            if self.policy == "static":
                return  # its last output comes with the batch's end
            timing = output.timing
            total = self.engine.finished_at[request_id] - self.engine.arrived_at[client, request_id]
            parts = timing.queue_seconds + timing.prefill + timing.decode
            assert abs(parts - total) < 1e-6

    def _live(self):
        return [
            key
            for key in self.engine.messages
            if key[1] not in self.aborted and not self.engine.is_over(key)
        ]

    def _note_aborted(self, keys):
        self.aborted |= {request_id for _, request_id in keys}


class PrefillFirstMachine(EngineMachine):
    policy = "prefill_first"


class StaticMachine(EngineMachine):
    policy = "static"


class EarlyMachine(EngineMachine):
    """Steps are planned ahead, and run when they are launched."""

    overlap = "early"


class LateMachine(EngineMachine):
    """Steps are planned ahead, and run when whatever happens meanwhile has happened."""

    overlap = "late"


class LatePrefillFirstMachine(LateMachine):
    policy = "prefill_first"


def test_any_order_of_events_keeps_the_books_and_the_answers():
    run_state_machine_as_test(EngineMachine, settings=SETTINGS)


def test_prefill_first_keeps_the_books_and_the_answers():
    run_state_machine_as_test(PrefillFirstMachine, settings=SETTINGS)


def test_static_batches_keep_the_books_and_the_answers():
    run_state_machine_as_test(StaticMachine, settings=SETTINGS)


def test_steps_planned_ahead_keep_the_books_and_the_answers():
    run_state_machine_as_test(EarlyMachine, settings=SETTINGS)


def test_steps_that_run_as_late_as_may_be_keep_the_books_and_the_answers():
    run_state_machine_as_test(LateMachine, settings=SETTINGS)


def test_prefill_first_with_steps_planned_ahead_keeps_the_books_and_the_answers():
    run_state_machine_as_test(LatePrefillFirstMachine, settings=SETTINGS)
