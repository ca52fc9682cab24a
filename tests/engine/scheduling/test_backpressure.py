"""Full queues: who is refused, and when told to come back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, RequestRefused
from engine.scheduling.backpressure import MAX_RETRY_SECONDS, Congestion, Pressure, WindowCount
from tests.support.memory_engine import MemoryEngine, request

SECOND = 1_000_000_000


def test_events_are_counted_over_a_window_that_moves():
    count = WindowCount(0)
    for second in range(10):
        for _ in range(3):
            count.note(second * SECOND)
    assert count.total(9 * SECOND) == 30 and count.seconds(9 * SECOND) == 9
    assert count.total(15 * SECOND) == pytest.approx(15)
    assert count.total(20 * SECOND) == 0 == count.total(500 * SECOND)
    assert count.seconds(500 * SECOND) == 10


def drained(pressure: Pressure, per_second: int, seconds: int, start: int = 0) -> int:
    """Let so many leave in each second; returns the time after it."""
    for step in range(per_second * seconds):
        pressure.leave(start + (step + 1) * SECOND // per_second)
    return start + seconds * SECOND


def test_each_refusal_is_told_when_the_queue_will_have_room_for_it():
    pressure = Pressure(0)
    pressure.begin(0)
    now = drained(pressure, 2, 10)
    told = [pressure.refuse(8, 8, now) for _ in range(6)]
    assert told[0] == Congestion(queued=8, drain_per_second=2.0, retry_after=1.0)
    assert [c.retry_after for c in told] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert pressure.refuse(18, 8, now).retry_after == pytest.approx(8.5)  # ten too many wait


def test_a_slower_queue_sends_away_for_longer_and_a_stuck_one_for_longest():
    def wait(per_second: int) -> float:
        pressure = Pressure(0)
        pressure.begin(0)
        now = drained(pressure, per_second, 20)
        for _ in range(19):
            pressure.refuse(4, 4, now)
        return pressure.refuse(4, 4, now).retry_after

    assert wait(1) == pytest.approx(20, rel=0.1) and wait(5) == pytest.approx(4, rel=0.1)
    stuck = Pressure(0)
    stuck.begin(0)
    assert stuck.refuse(4, 4, 11 * SECOND).retry_after == MAX_RETRY_SECONDS


def test_a_queue_that_has_just_filled_is_judged_by_its_past_and_not_by_its_idle_time():
    pressure = Pressure(0)
    pressure.begin(0)
    now = drained(pressure, 4, 10)
    later = now + 3600 * SECOND
    pressure.begin(later)  # it was empty for an hour
    told = [pressure.refuse(4, 4, later + 1).retry_after for _ in range(8)]
    assert told[0] == 1.0 and told[-1] >= 1.0
    pressure.leave(later + SECOND)
    assert pressure.refuse(4, 4, later + SECOND).drain_per_second == pytest.approx(1.0)


def refusal(engine: MemoryEngine, request_id: int, **fields: str) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        engine.add(request(request_id, [1], **fields))
    engine.core.check_integrity()
    return caught.value


def test_a_tenant_may_have_a_shorter_queue_than_others_and_never_a_longer_one():
    engine = MemoryEngine(max_num_seqs=1, max_queued_per_tenant=3)
    for number, (tenant, max_queued, limit) in enumerate([("small", 2, 2), ("large", 9, 3)]):
        for waiting in range(limit):
            engine.add(request(10 * number + waiting, [1], tenant=tenant, max_queued=max_queued))
        with pytest.raises(RequestRefused) as refused:
            engine.add(request(10 * number + 9, [1], tenant=tenant, max_queued=max_queued))
        assert (refused.value.code, refused.value.limit) == ("tenant_queue_full", limit)


def test_the_narrowest_full_queue_refuses_and_the_others_go_on():
    engine = MemoryEngine(
        max_num_seqs=1, max_queue_len=6, max_queued_per_tenant=4, max_queued_per_adapter=2
    )
    for number, adapter in enumerate([None, None, "a", "a"], 1):
        engine.add(request(number, [1], adapter=adapter))
    of_adapter = refusal(engine, 5, adapter="a")
    assert (of_adapter.code, of_adapter.limit) == ("adapter_queue_full", 2)
    assert of_adapter.congestion is not None and of_adapter.congestion.queued == 2
    assert refusal(engine, 5).code == "adapter_queue_full"
    of_tenant = refusal(engine, 5, adapter="b")
    assert (of_tenant.code, of_tenant.limit) == ("tenant_queue_full", 4)
    engine.add(request(5, [1], adapter="a", tenant="u"))
    engine.add(request(6, [1], tenant="u"))
    of_all = refusal(engine, 7, tenant="v")
    assert (of_all.code, of_all.limit) == ("queue_full", 6)
    engine.run()
    for number in range(1, 7):
        engine.assert_as_alone(number)
    engine.add(request(8, [1], adapter="b"))
    engine.run()
    engine.assert_at_rest()


def test_the_rate_is_measured_on_the_queue_that_is_full():
    """Steps of a second; one tenant's requests take one step each, the other's take eight."""
    engine = MemoryEngine(max_num_seqs=2, max_queued_per_tenant=3)
    told: dict[str, Congestion] = {}
    number = 0
    for _ in range(40):
        for tenant, max_tokens in (("quick", 1), ("slow", 8)):
            while True:
                number += 1
                try:
                    engine.add(request(number, [1], tenant=tenant, max_tokens=max_tokens))
                except RequestRefused as refused:
                    assert refused.congestion is not None
                    told[tenant] = refused.congestion
                    break
        engine.step()
    assert told["quick"].drain_per_second > 3 * told["slow"].drain_per_second > 0
    assert told["slow"].retry_after > 3 * told["quick"].retry_after
    engine.run()
    engine.assert_at_rest()


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("tu"), st.sampled_from([None, "a", "b"])),
            st.tuples(st.just("abort"), st.integers(0, 40), st.none()),
            st.tuples(st.just("step"), st.none(), st.none()),
        ),
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_request_is_refused_exactly_when_a_queue_of_its_own_is_full(moves: list[Any]):
    limits = {"adapter_queue_full": 2, "tenant_queue_full": 4, "queue_full": 6}
    engine = MemoryEngine(
        max_num_seqs=2, num_kv_blocks=8, max_queue_len=6, max_queued_per_tenant=4,
        max_queued_per_adapter=2,
    )  # fmt: skip
    waiting = engine.core._scheduler._lifecycle.waiting  # pyright: ignore
    added: list[int] = []
    for number, (kind, what, adapter) in enumerate(moves, 1):
        if kind == "step":
            engine.step()
        elif kind == "abort":
            if added:
                engine.core.abort("c", added[what % len(added)])
        else:
            tenant = waiting.tenants.get(what)
            queue = tenant.queues.get(adapter) if tenant else None
            waits = {
                "adapter_queue_full": len(queue) if queue is not None else 0,
                "tenant_queue_full": tenant.num_waiting if tenant else 0,
                "queue_full": waiting.num_waiting,
            }
            full = [code for code, limit in limits.items() if waits[code] >= limit]
            message = request(number, [1, 2, 3], tenant=what, adapter=adapter, max_tokens=12)
            try:
                engine.add(message)
                added.append(number)
                assert not full
            except RequestRefused as refused:
                assert refused.code == full[0] and refused.congestion is not None
                assert refused.congestion.queued == waits[full[0]]
                assert 1 <= refused.congestion.retry_after <= MAX_RETRY_SECONDS
        engine.core.check_integrity()
    for number in added:
        engine.core.abort("c", number)
    assert engine.core.stats().waiting == engine.core.stats().running == 0


@pytest.mark.parametrize("name", ["max_queued_per_tenant", "max_queued_per_adapter"])
def test_a_queue_without_places_is_refused_at_start(name: str):
    with pytest.raises(ConfigError, match=name):
        MemoryEngine(**{name: 0})
