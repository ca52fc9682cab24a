"""Every second of waiting has a cause, and the seconds sum exactly."""

import random

import pytest

from engine.scheduling.wait_causes import CAUSES, HoldClock, WaitLedger, add_wait, seconds_by_cause
from tests.support.memory_engine import FakeSource, MemoryEngine, request


def test_readings_sum_to_the_time_between_them_whatever_changes():
    rng = random.Random(0)
    clocks = [HoldClock(0), HoldClock(0)]
    ledger = WaitLedger(clocks[0], "turn", 0)
    now = 0
    readings = [(now, ledger.read(now))]
    for _ in range(2000):
        now += rng.randrange(10)
        if rng.random() < 0.3:
            rng.choice(clocks).turn(rng.random() < 0.5, now)
        else:
            ledger.change(rng.choice(CAUSES), now, rng.choice([None, *clocks]))
        readings.append((now, ledger.read(now)))
    for (begin, before), (end, after) in zip(
        readings, rng.sample(readings, len(readings)), strict=True
    ):
        total = [0] * len(CAUSES)
        add_wait(total, before, after)
        assert sum(total) == end - begin
        if end >= begin:
            assert min(total) >= 0


def test_a_hold_is_quota_for_every_queue_of_the_tenant_and_stops_their_own_causes():
    clock = HoldClock(0)
    slot, turn = WaitLedger(clock, "slot", 0), WaitLedger(clock, "turn", 0)
    clock.turn(True, 10)
    slot.change("load", 12)
    clock.turn(False, 30)
    assert seconds_by_cause(slot.read(10**9)) == {
        "quota": 20e-9, "load": (10**9 - 30) / 1e9, "slot": 10e-9,
    }  # fmt: skip
    assert seconds_by_cause(turn.read(40)) == {"quota": 20e-9, "turn": 20e-9}


def test_a_queue_may_be_held_by_another_clock_from_some_time_on():
    tenant, slotless = HoldClock(0), HoldClock(0)
    queue = WaitLedger(slotless, "slot", 0)
    slotless.turn(True, 10)
    queue.change("load", 30, tenant)
    assert not queue.is_held
    tenant.turn(True, 35)
    queue.change("slot", 40, slotless)
    slotless.turn(False, 50)
    assert seconds_by_cause(queue.read(60)) == {
        "quota": 35e-9, "load": 5e-9, "slot": 20e-9,
    }  # fmt: skip


def _queue(engine: MemoryEngine, number: int) -> dict[str, float]:
    timing = engine.last(number).timing
    assert timing is not None
    total = timing.queue_seconds + timing.prefill + timing.decode
    lifetime = engine.finished_at[number] - engine.arrived_at["c", number]
    assert total == pytest.approx(lifetime, abs=1e-9)
    return timing.queue


def test_load_is_the_time_until_the_weights_are_there():
    engine = MemoryEngine(source=FakeSource(auto=False))
    engine.add(request(1, [1], adapter="a"))
    engine.step()
    engine.clock.now = 3.0
    engine.source.deliver("a")
    engine.run()
    queue = _queue(engine, 1)
    assert queue["load"] == pytest.approx(3.0, abs=0.1) and set(queue) == {"load", "turn"} & {
        *queue
    }


def test_slot_is_the_time_until_another_adapter_makes_room():
    engine = MemoryEngine(max_loras=1, max_num_seqs=1)
    engine.add(request(1, [1], adapter="a", max_tokens=10, tenant="x"))
    engine.step()
    engine.step()
    engine.add(request(2, [1], adapter="b", tenant="y"))
    engine.run()
    queue = _queue(engine, 2)
    assert queue["slot"] >= engine.finished_at[1] - engine.arrived_at["c", 2] - 1.1
    assert queue["slot"] > 0.9 * sum(queue.values())


def test_kv_is_the_wait_of_a_head_for_blocks():
    engine = MemoryEngine(num_kv_blocks=8, block_size=4)
    engine.add(request(1, [1] * 16, max_tokens=9))
    engine.step()
    engine.add(request(2, [2] * 16, max_tokens=2))
    engine.run()
    assert _queue(engine, 2) == {"kv": pytest.approx(engine.finished_at[1] - 1)}


def test_budget_is_the_wait_of_a_head_for_a_seat_and_turn_the_wait_behind_it():
    engine = MemoryEngine(max_num_seqs=1)
    engine.add(request(1, [1], tenant="x", max_tokens=6))
    engine.step()
    engine.add(request(2, [2], tenant="y", max_tokens=5))
    engine.add(request(3, [3], tenant="z", max_tokens=5))
    engine.run()
    assert _queue(engine, 2) == {"budget": 5.0}
    assert _queue(engine, 3) == {"turn": 5.0, "budget": 5.0}


def test_budget_is_the_wait_for_tokens_too():
    engine = MemoryEngine(max_num_batched_tokens=8, max_num_seqs=4, num_kv_blocks=200)
    engine.add(request(1, [1] * 80, tenant="x"))
    engine.add(request(2, [2] * 80, tenant="y"))
    engine.add(request(3, [3] * 4, tenant="z"))
    engine.run()
    assert set(_queue(engine, 3)) == {"budget"}


def test_quota_is_the_wait_for_the_tenants_own_limit():
    engine = MemoryEngine(max_num_seqs=4)
    engine.add(request(1, [1], max_concurrent=1, max_tokens=6))
    engine.add(request(2, [1], max_concurrent=1, max_tokens=6))
    engine.run()
    assert _queue(engine, 2) == {"quota": 6.0}


def test_every_preemption_adds_the_wait_until_it_runs_again():
    engine = MemoryEngine(num_kv_blocks=6, block_size=4, max_num_seqs=4)
    engine.add(request(1, [1] * 7, tenant="x", max_tokens=16))
    engine.add(request(2, [2] * 7, tenant="x", max_tokens=16))
    engine.run()
    timing = engine.last(2).timing
    assert timing is not None and timing.preemptions >= 1
    last = engine.runner.batches
    ran = sum(any(row.sequence_id == 2 for row in batch.rows) for batch in last)
    waited = engine.finished_at[2] - engine.arrived_at["c", 2] - ran
    assert timing.queue_seconds == pytest.approx(waited)
    assert timing.queue.get("kv", 0) > 0


def test_an_aborted_wait_leaves_the_others_ledgers_right():
    engine = MemoryEngine(max_num_seqs=1)
    engine.add(request(1, [1], max_tokens=4))
    engine.step()
    engine.add(request(2, [2], max_tokens=4))
    engine.add(request(3, [3], max_tokens=4))
    engine.step()
    engine.core.abort("c", 2)
    engine.run()
    assert sum(_queue(engine, 3).values()) == pytest.approx(3.0)


def test_a_wait_is_told_with_the_first_token_after_it_and_not_only_at_the_end():
    engine = MemoryEngine(num_kv_blocks=6, block_size=4, max_num_seqs=4)
    for number in (1, 2):
        engine.add(request(number, [number] * 7, tenant="x", max_tokens=16))
    engine.run()
    outputs = engine.outputs["c", 2]
    told = [output.timing for output in outputs if output.timing is not None]
    last = engine.last(2).timing
    assert last is not None and last.preemptions >= 1
    assert outputs[0].timing is told[0] and told[0].preemptions == 0
    assert len(told) == 1 + last.preemptions + 1  # first token, each return, the end
    assert (told[-2].queue, told[-2].prefill, told[-2].preemptions) == (
        last.queue,
        last.prefill,
        last.preemptions,
    )
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_stats_tell_what_each_busy_queue_waits_for_and_how_long_its_requests_waited():
    engine = MemoryEngine(max_loras=1, max_num_seqs=2, num_kv_blocks=200)
    for number in range(1, 9):
        adapter = "ab"[number % 2]
        engine.add(request(number, [number] * 4, tenant="x", adapter=adapter, max_tokens=6))
    engine.step()
    queues = {queue.adapter: queue for queue in engine.core.stats().queues}
    assert set(queues) == {"a", "b"}
    assert sum(queue.waiting for queue in queues.values()) == engine.core.stats().waiting > 0
    waiting = [queue for queue in queues.values() if queue.waiting]
    assert {queue.cause for queue in waiting} <= {"load", "slot", "turn", "budget"}
    waited: dict[str | None, dict[str, float]] = {}
    while engine.core.stats().running + engine.core.stats().waiting:
        engine.step()
        waited |= {queue.adapter: queue.waited for queue in engine.core.stats().queues}
    assert engine.core.stats().queues == []
    for adapter, numbers in (("a", (2, 4, 6, 8)), ("b", (1, 3, 5, 7))):
        timings = [engine.last(number).timing for number in numbers]
        of_requests = [timing.queue for timing in timings if timing is not None]
        assert len(of_requests) == len(numbers)
        total = {cause: sum(q.get(cause, 0.0) for q in of_requests) for cause in CAUSES}
        assert waited[adapter] == {
            cause: pytest.approx(seconds) for cause, seconds in total.items() if seconds
        }
