"""Whatever happens to the engine, in any order: what it tells is what happened."""

from collections import Counter

from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from engine.telemetry.records import GetTelemetry, RequestRecord
from tests.properties.test_scheduler_properties import SETTINGS, EngineMachine, Overlap

LONGEST_TIMELINE = 33


class WatchedMachine(EngineMachine):
    @invariant()
    def slots_are_told_as_they_are(self):
        told = self.engine.journal._residences
        assert set(told) == set(self.engine.core.stats().resident)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        super().teardown()
        question = GetTelemetry(limit=100_000, with_totals=True)
        told = self.engine.journal.telemetry(question, generation=1)
        records = {int(record.call): record for record in told.requests}
        assert len(told.requests) == len(records) == len(self.engine.messages)
        for client, request_id in self.engine.messages:
            self._check_record(client, request_id, records[request_id])
        assert told.totals is not None
        assert sum((Counter(t.requests) for t in told.totals.adapters), Counter()) == Counter(
            record.finish_reason for record in told.requests
        )
        for share in (share for step in told.steps for share in step.shares):
            assert share.prefill_rows + share.decode_rows > 0
            assert share.prefill_tokens >= share.prefill_rows
        preemptions = sum(step.preemptions for step in told.steps)
        assert preemptions <= self.engine.core.stats().preemptions
        kinds = Counter(event.kind for event in told.slot_events)
        assert kinds["loading"] - kinds["evicted"] == len(self.engine.core.stats().resident)

    def _check_record(self, client: str, request_id: int, record: RequestRecord):
        message = self.engine.messages[client, request_id]
        assert len(record.finish_reasons) == message.sampling.n
        assert record.prompt_tokens == len(message.prompt_token_ids)
        times = [at for at, _ in record.timeline]
        assert times == sorted(times) and times[-1] == record.seconds
        if message.sampling.n == 1 and len(record.timeline) < LONGEST_TIMELINE:
            assert abs(waited_by_timeline(record) - record.queue_seconds) < 1e-6
        if request_id in self.aborted:
            return
        outputs = self.engine.outputs[client, request_id]
        deltas = [delta for output in outputs for delta in output.deltas]
        last = outputs[-1]
        assert record.queue == last.timing.queue and record.cached_tokens == last.num_cached_tokens
        assert record.preemptions == last.timing.preemptions
        assert record.output_tokens == sum(len(delta.token_ids) for delta in deltas)
        assert Counter(record.finish_reasons) == Counter(
            delta.finish_reason for delta in deltas if delta.finish_reason is not None
        )
        assert record.error_code == last.error_code


def waited_by_timeline(record: RequestRecord) -> float:
    """From `queued` or `preempted` to the next `prefill`, or to the end."""
    waited, since = 0.0, None
    for at, state in record.timeline:
        if state in ("queued", "preempted"):
            since = at
        elif state in ("prefill", "done") and since is not None:
            waited, since = waited + at - since, None
    return waited


class WatchedStaticMachine(WatchedMachine):
    policy = "static"


class WatchedEarlyMachine(WatchedMachine):
    overlap: Overlap | None = "early"


FEW = settings(SETTINGS, max_examples=15)


def test_records_tell_what_happened():
    run_state_machine_as_test(WatchedMachine, settings=FEW)


def test_records_of_static_batches_tell_what_happened():
    run_state_machine_as_test(WatchedStaticMachine, settings=FEW)


def test_records_of_steps_planned_ahead_tell_what_happened():
    run_state_machine_as_test(WatchedEarlyMachine, settings=FEW)
