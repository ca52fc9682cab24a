"""A tenant's quota of slots: its other adapters wait for it, and nobody else does."""

from tests.support.memory_engine import MemoryEngine, request


def on_slots(engine: MemoryEngine, tenant: str) -> set[str | None]:
    queues = engine.core._scheduler._lifecycle.waiting.tenants[tenant].queues.values()
    return {queue.adapter for queue in queues if queue.num_running} - {None}


def run(engine: MemoryEngine, tenant: str) -> int:
    """Run to the end; returns how many adapters of the tenant ran at most in one step."""
    most = 0
    while engine.core.has_work:
        engine.step()
        if tenant in engine.core._scheduler._lifecycle.waiting.tenants:
            most = max(most, len(on_slots(engine, tenant)))
    return most


def test_adapters_beyond_the_quota_wait_with_that_cause_and_others_pass():
    engine = MemoryEngine(max_loras=4, max_num_seqs=8)
    for number, adapter in enumerate(("a", "b", "c")):
        fields = {"tenant": "t", "adapter": adapter, "max_slots": 1, "max_tokens": 8}
        engine.add(request(number, [1 + number], **fields))
    engine.add(request(10, [9], tenant="t", max_slots=1, max_tokens=8))
    engine.add(request(11, [9], tenant="u", adapter="d", max_tokens=8))
    assert run(engine, "t") == 1
    assert engine.first_token_at[10] <= 1, "the base model needs no slot"
    assert engine.first_token_at[11] < engine.finished_at[0]
    for number in (1, 2):
        timing = engine.last(number).timing
        assert timing is not None and set(timing.queue) <= {"quota", "load", "slot", "turn"}
        assert timing.queue["quota"] >= 7.0
    assert not engine.last(11).timing.queue.get("quota")


def test_idle_adapters_in_slots_do_not_count_for_the_quota_and_reserved_slots_do():
    engine = MemoryEngine(max_loras=4, max_num_seqs=8)

    def counted() -> dict[str, int]:
        return {load.tenant: load.slots for load in engine.core.stats().tenants}

    for number, adapter in enumerate(("a", "b")):
        engine.add(request(number, [1], tenant="t", adapter=adapter, max_slots=2, max_tokens=2))
        engine.run()
    assert counted() == {}, "both are in slots, and nothing runs"
    engine.add(request(7, [1], tenant="t", adapter="a", max_slots=2, max_tokens=9))
    engine.step()
    assert counted() == {"t": 1}
    engine.add(request(8, [1], tenant="t", adapter="c", max_slots=2, max_tokens=9))
    engine.step()
    assert counted() == {"t": 2}


def test_more_calls_of_an_adapter_that_has_its_slot_go_on():
    engine = MemoryEngine(max_loras=4, max_num_seqs=8)
    for number in range(3):
        engine.add(request(number, [1], tenant="t", adapter="a", max_slots=1, max_tokens=8))
    engine.run()
    assert all("quota" not in engine.last(n).timing.queue for n in range(3))
    assert max(engine.first_token_at.values()) - min(engine.first_token_at.values()) <= 1


def test_adapters_of_one_tenant_take_turns_however_many_calls_one_of_them_has():
    engine = MemoryEngine(max_loras=4, max_num_seqs=2, slot_debt_tokens=16)
    for number in range(40):
        engine.add(request(number, [1], tenant="t", adapter="a", max_slots=1, max_tokens=6))
    engine.step()
    engine.add(request(100, [2], tenant="t", adapter="b", max_slots=1, max_tokens=6))
    assert run(engine, "t") == 1
    num_before = sum(engine.finished_at[n] < engine.first_token_at[100] for n in range(40))
    assert num_before <= 8, "the other adapter had to wait until all was done"


def test_an_idle_adapter_of_a_tenant_that_has_no_more_slots_leaves_its_slot_to_others():
    engine = MemoryEngine(max_loras=2, max_num_seqs=8)
    engine.add(request(1, [1], tenant="t", adapter="a", max_slots=1, max_tokens=2))
    engine.run()
    engine.add(request(2, [2], tenant="t", adapter="b", max_slots=1, max_tokens=30))
    engine.step()
    engine.step()
    assert on_slots(engine, "t") == {"b"}
    engine.add(request(3, [3], tenant="t", adapter="a", max_slots=1, max_tokens=2))
    engine.add(request(4, [4], tenant="u", adapter="c", max_tokens=2))
    engine.run()
    assert engine.finished_at[4] < engine.finished_at[2] < engine.first_token_at[3]
    assert "slot" not in engine.last(4).timing.queue


def test_a_quota_that_is_raised_lets_more_adapters_in():
    engine = MemoryEngine(max_loras=4, max_num_seqs=8)
    engine.add(request(1, [1], tenant="t", adapter="a", max_slots=1, max_tokens=20))
    engine.step()
    engine.step()
    engine.add(request(2, [2], tenant="t", adapter="b", max_slots=1, max_tokens=4))
    engine.step()
    assert on_slots(engine, "t") == {"a"}
    engine.add(request(3, [3], tenant="t", adapter="b", max_slots=2, max_tokens=4))
    engine.run()
    assert engine.finished_at[2] < engine.finished_at[1]
