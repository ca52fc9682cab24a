"""Counters by themselves, then what they promise, in simulated time."""

import random

import msgspec
import pytest

from engine.scheduling.counter_heap import CounterHeap
from engine.scheduling.fairness import Contenders
from tests.support.memory_engine import MemoryEngine, request


class Member:
    def __init__(self, name: str, counter: float = 0.0) -> None:
        self.name = name
        self.counter = counter
        self.idle = False


def test_a_counter_heap_equals_a_sort_while_keys_grow_and_members_come_and_go():
    rng = random.Random(0)
    members = [Member(str(number)) for number in range(30)]
    heap = CounterHeap[Member](key=lambda member: (member.counter, int(member.name)))
    inside: set[Member] = set()
    for _ in range(5000):
        member = rng.choice(members)
        action = rng.random()
        if action < 0.3:
            heap.push(member)
            inside.add(member)
        elif action < 0.4:
            heap.discard(member)
            inside.discard(member)
        elif action < 0.9:
            member.counter += rng.random()
        elif member in inside:
            member.counter -= rng.random()
            heap.push(member)  # a key that fell is pushed again
        smallest = min(inside, key=lambda m: (m.counter, int(m.name)), default=None)
        assert heap.min() is smallest
        assert len(heap) == len(inside)


def test_newcomers_are_lifted_to_the_least_served_who_wait_and_never_lowered():
    contenders = Contenders[Member](lambda member: member.idle)
    low, high = Member("low", 10), Member("high", 50)
    contenders.enter(low)
    contenders.enter(high)
    newcomer, served = Member("new"), Member("served", 99)
    contenders.enter(newcomer)
    contenders.enter(served)
    assert (newcomer.counter, served.counter) == (10, 99)


def test_when_nobody_waits_newcomers_are_lifted_to_the_last_who_did():
    contenders = Contenders[Member](lambda member: member.idle)
    first, last = Member("first", 5), Member("last", 30)
    for member in (first, last):
        contenders.enter(member)
    contenders.leave(first)
    contenders.leave(last)
    last.counter += 7  # it still runs, and is charged
    newcomer = Member("new")
    contenders.enter(newcomer)
    assert newcomer.counter == 37


def test_the_idle_are_forgotten_once_being_lifted_would_not_lower_them():
    contenders = Contenders[Member](lambda member: member.idle)
    idle, waiting = Member("idle", 20), Member("waiting", 10)
    idle.idle = True
    contenders.enter(waiting)
    contenders.rest(idle)
    assert list(contenders.forgettable()) == []
    waiting.counter = 25
    assert list(contenders.forgettable()) == [idle]
    assert list(contenders.forgettable()) == []


# -- in simulated time


def _service(engine: MemoryEngine, tenant: str) -> float:
    """Uncached prompt tokens of admitted requests, and output tokens at weight 2."""
    total = 0.0
    for key, message in engine.messages.items():
        outputs = engine.outputs[key]
        if message.tenant == tenant and outputs:
            total += len(message.prompt_token_ids) - outputs[0].num_cached_tokens
            total += 2 * sum(len(delta.token_ids) for o in outputs for delta in o.deltas)
    return total


def test_one_request_beside_two_hundred_is_served_with_the_next_seat():
    engine = MemoryEngine(max_num_seqs=4, max_num_batched_tokens=32)
    for number in range(200):
        engine.add(request(number, [1 + number % 30] * 6, tenant="many", max_tokens=10))
    for _ in range(5):
        engine.step()
    engine.add(request(1000, [2] * 6, tenant="one", max_tokens=10))
    running = [n for n in engine.first_token_at if not engine.is_over(("c", n))]
    while 1000 not in engine.first_token_at:
        engine.step()
    next_seat = min(engine.finished_at[n] for n in running if n in engine.finished_at)
    assert engine.first_token_at[1000] <= next_seat + 1


def test_a_large_head_is_not_starved_by_small_ones_that_would_fit():
    engine = MemoryEngine(num_kv_blocks=12, block_size=4, max_num_seqs=8)
    number = 0
    for _ in range(4):
        number += 1
        engine.add(request(number, [1, 2], tenant="small", max_tokens=10))
    engine.step()
    engine.add(request(1000, [9] * 40, tenant="large", max_tokens=2))
    for _ in range(40):
        if 1000 in engine.first_token_at:
            break
        number += 1
        engine.add(request(number, [1, 2], tenant="small", max_tokens=10))
        engine.step()
    assert 1000 in engine.first_token_at
    engine.run()


@pytest.mark.parametrize(("weight_a", "weight_b"), [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)])
def test_backlogged_tenants_share_by_weight_within_two_units(weight_a, weight_b):
    rng = random.Random(1)
    engine = MemoryEngine(
        num_kv_blocks=50, max_num_seqs=6, max_num_batched_tokens=32, enable_prefix_cache=False
    )
    for number in range(2400):
        tenant, weight = ("a", weight_a) if number % 8 else ("b", weight_b)
        # `b` asks for much longer answers: shares are of tokens, not of requests.
        longest = 6 if tenant == "a" else 24
        engine.add(
            request(
                number,
                [1] * rng.randint(1, 16),
                tenant=tenant,
                weight=weight,
                max_tokens=rng.randint(1, longest),
            )
        )
    unit = 2 * 50 * 4  # output weight x tokens that fit the pool, more than any prompt
    for step in range(1000):
        engine.step()
        if step % 20 == 0:
            shares = _service(engine, "a") / weight_a, _service(engine, "b") / weight_b
            assert abs(shares[0] - shares[1]) <= 2 * unit
    assert min(shares) > 3 * unit, "long enough for an unfair share to show"
    assert 0.9 < shares[0] / shares[1] < 1.1


def test_a_tenants_own_queues_share_equally_too():
    engine = MemoryEngine(max_num_seqs=4, max_num_batched_tokens=32, max_loras=2)
    for number in range(150):
        adapter = "a" if number % 3 else None  # twice as many requests of the adapter
        engine.add(request(number, [1 + number % 30] * 5, adapter=adapter, max_tokens=6))
    for _ in range(80):
        engine.step()

    def done(adapter: str | None) -> int:
        return sum(
            engine.is_over(key) for key, m in engine.messages.items() if m.adapter == adapter
        )

    assert abs(done("a") - done(None)) <= 4 and done(None) > 20


def test_idling_earns_no_credit():
    engine = MemoryEngine(max_num_seqs=2, max_num_batched_tokens=16)
    for number in range(60):
        engine.add(request(number, [1 + number % 30] * 4, tenant="busy", max_tokens=8))
    for _ in range(120):
        engine.step()
    for number in range(100, 160):
        engine.add(request(number, [1 + number % 30] * 4, tenant="rested", max_tokens=8))
    start = {tenant: _service(engine, tenant) for tenant in ("busy", "rested")}
    for _ in range(60):
        engine.step()
    gained = {tenant: _service(engine, tenant) - start[tenant] for tenant in start}
    assert abs(gained["busy"] - gained["rested"]) <= 2 * 2 * (4 + 2 * 8)


def test_a_tenant_at_its_limit_is_passed_over_and_others_are_not_held_up():
    engine = MemoryEngine(max_num_seqs=4)
    for number in range(4):
        engine.add(request(number, [1 + number], tenant="limited", max_concurrent=2, max_tokens=10))
    engine.add(request(10, [9], tenant="free", max_tokens=10))
    engine.step()
    assert set(engine.first_token_at) == {0, 1, 10}
    engine.run()
    for batch in engine.runner.batches:
        assert len(batch.rows) <= 3
    assert set(engine.last(2).timing.queue) <= {"quota", "turn", "budget"}
    assert engine.last(2).timing.queue["quota"] > 0


def test_forks_count_against_the_limit_before_they_exist():
    engine = MemoryEngine(max_num_seqs=8)
    engine.add(request(1, [1], tenant="t", max_concurrent=3, n=3, max_tokens=6))
    engine.add(request(2, [2], tenant="t", max_concurrent=3, max_tokens=6))
    engine.run()
    assert max(len(batch.rows) for batch in engine.runner.batches) == 3
    assert engine.first_token_at[2] > min(engine.finished_at[1] - 1, 6)


def test_a_request_for_more_choices_than_its_tenant_has_left_waits_and_others_pass():
    engine = MemoryEngine(max_num_seqs=8)
    for number, n in ((1, 1), (2, 1), (3, 2)):
        engine.add(request(number, [number], tenant="t", max_concurrent=3, n=n, max_tokens=8))
    engine.add(request(4, [4], tenant="u", max_tokens=30))
    engine.run()
    assert max(len(batch.rows) for batch in engine.runner.batches) == 3
    assert engine.first_token_at[4] == 1
    assert engine.last(3).timing.queue == {"quota": 8.0}


def test_tenants_and_queues_that_come_and_go_leave_nothing_behind():
    engine = MemoryEngine(max_loras=1)
    for number in range(100):
        engine.add(request(number, [1] * 5, tenant=f"t{number % 7}", adapter=f"a{number}"))
        engine.run()
        engine.core.unload(f"a{number}")
        engine.run()
    lifecycle = engine.core._scheduler._lifecycle  # pyright: ignore
    waiting = lifecycle.waiting
    assert len(waiting.tenants) <= 7
    assert sum(len(tenant.queues) for tenant in waiting.tenants.values()) <= 7
    assert lifecycle.blocks.num_published == 0 and not engine.runner.slots
    assert not engine.source.in_host and len(engine.source.forgotten) == 100
    assert not lifecycle.slots._adapters and not engine.core._scheduler._requests
    engine.assert_at_rest()


def test_a_queue_that_is_never_idle_keeps_no_names_of_versions_that_are_over():
    engine = MemoryEngine(max_num_seqs=4)
    for number in range(20):
        message = request(number, [number], adapter="tone", max_tokens=6)
        engine.add(msgspec.structs.replace(message, label=f"tone@{number}"))
        engine.step()
        engine.step()
        told = {queue.label: queue.waiting + queue.running for queue in engine.core.stats().queues}
        live = [name for name in range(number + 1) if not engine.is_over(("c", name))]
        assert told == {f"tone@{name}": 1 for name in live} and len(told) < 5
        assert number == 0 or len(told) > 1, "never idle"
    [queue] = engine.core._scheduler._lifecycle.waiting.queues_of("tone")  # pyright: ignore
    assert queue.label is None
    engine.run()
    engine.add(msgspec.structs.replace(request(20, [1], adapter="tone"), label="tone@20"))
    [queue] = engine.core._scheduler._lifecycle.waiting.queues_of("tone")  # pyright: ignore
    assert queue.label == "tone@20"


def test_a_queue_of_many_names_does_not_keep_others_from_being_told():
    engine = MemoryEngine(max_num_seqs=1)
    for number in range(150):
        message = request(number, [1], adapter="tone")
        engine.add(msgspec.structs.replace(message, label=f"tone@{number}"))
    for number in range(150, 152):
        engine.add(request(number, [1], tenant="u", adapter="other"))
    told = engine.core.stats().queues
    assert len(told) == 100 and (told[0].tenant, told[0].waiting) == ("u", 2)


def test_who_lost_its_blocks_resumes_first_also_behind_one_who_lost_its_slot():
    engine = MemoryEngine()
    for number in (1, 2):
        engine.add(request(number, [number] * 5, adapter="a", max_tokens=9))
    for _ in range(3):
        engine.step()
    lifecycle = engine.core._scheduler._lifecycle
    first, second = lifecycle.running
    lifecycle.preempt(second, for_blocks=True)
    lifecycle.preempt(first)
    engine.core.check_integrity()
    engine.core.abort("c", 1)
    assert lifecycle.waiting.resuming.min() is second.request.queue
    engine.core.check_integrity()
    engine.run()
    engine.assert_as_alone(2)
