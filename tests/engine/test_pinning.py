"""Pinned adapters get a slot without pushing anybody out, and keep it."""

import pytest

from tests.support.memory_engine import FakeSource, MemoryEngine, request


def _pin(engine: MemoryEngine, *digests: str) -> None:
    engine.core.pin(frozenset(digests))
    engine.core.check_integrity()


def _serve(engine: MemoryEngine, *adapters: str, first: int = 1) -> None:
    for number, adapter in enumerate(adapters, first):
        engine.add(request(number, [1, 2], adapter=adapter, tenant=adapter))
        engine.run()


def test_a_pinned_adapter_is_loaded_into_a_free_slot_before_anybody_asks_for_it():
    engine = MemoryEngine(max_loras=2)
    _pin(engine, "p")
    engine.run()
    assert engine.core.stats().resident == ["p"] and engine.source.num_loads == 1
    engine.add(request(1, [1, 2], adapter="p"))
    engine.run()
    assert set(engine.last(1).timing.queue) <= {"turn"}, "it need not wait for its weights"
    assert engine.source.num_loads == 1


def test_a_pinned_adapter_takes_an_idle_slot_and_never_a_busy_one():
    engine = MemoryEngine(max_loras=2)
    for number, adapter in enumerate("ab", 1):
        engine.add(request(number, [1], adapter=adapter, max_tokens=6 * number, tenant=adapter))
    for _ in range(3):
        engine.step()
    _pin(engine, "p")
    while not engine.is_over(("c", 1)):
        assert sorted(engine.core.stats().resident) == ["a", "b"]
        engine.step()
    engine.run()
    assert sorted(engine.core.stats().resident) == ["b", "p"]
    assert engine.core.stats().preemptions == 0


def test_a_pinned_adapter_outlives_idleness_while_others_come_and_go():
    engine = MemoryEngine(max_loras=2)
    _pin(engine, "p")
    _serve(engine, *"abcabc")
    assert "p" in engine.core.stats().resident
    _pin(engine)
    engine.run()
    assert "p" not in engine.source.wanted, "what is pinned no more may leave host memory"
    _serve(engine, "a", "b", first=10)
    assert sorted(engine.core.stats().resident) == ["a", "b"]
    engine.assert_at_rest()


def test_a_pinned_adapter_is_not_the_victim_however_much_it_was_served():
    engine = MemoryEngine(max_loras=2, slot_debt_tokens=20, max_num_seqs=8, num_kv_blocks=200)
    _pin(engine, "p")
    for number in (1, 2, 3):
        engine.add(request(number, [1], adapter="p", tenant="x", max_tokens=60))
    engine.add(request(4, [1], adapter="a", tenant="y", max_tokens=60))
    for _ in range(10):
        engine.step()
    engine.add(request(5, [1], adapter="b", tenant="z"))
    engine.run()
    assert engine.last(4).timing.preemptions > 0
    assert all(engine.last(number).timing.preemptions == 0 for number in (1, 2, 3))


def test_pinning_a_victim_spares_it_and_the_claim_takes_another_or_waits_again():
    engine = MemoryEngine(max_loras=2, slot_debt_tokens=10_000, max_num_seqs=8)
    engine.add(request(1, [1], adapter="a", tenant="x", max_tokens=40))
    engine.add(request(2, [1], adapter="b", tenant="y", max_tokens=8))
    for _ in range(4):
        engine.step()
    engine.add(request(3, [1], adapter="c", tenant="z"))
    engine.step()
    gate = engine.core._scheduler._lifecycle.gate  # pyright: ignore
    (victim,) = gate._victims
    _pin(engine, victim)
    assert list(gate._victims) == [{"a": "b", "b": "a"}[victim]]
    engine.run()
    for number in (1, 2, 3):
        engine.assert_as_alone(number)
    assert victim in engine.core.stats().resident


def test_pinning_the_only_possible_victim_gives_the_claim_back():
    engine = MemoryEngine(
        source=FakeSource(auto=False), max_loras=2, slot_debt_tokens=10_000, max_num_seqs=8
    )
    for number, adapter in enumerate("abc", 1):
        engine.add(request(number, [1], adapter=adapter, tenant=adapter, max_tokens=12))
        engine.source.deliver(adapter)
        if adapter == "b":
            del engine.source.in_host["b"]  # evicted before its slot is filled: it loads for long
        engine.step()
    gate = engine.core._scheduler._lifecycle.gate  # pyright: ignore
    assert list(gate._victims) == ["a"] and len(gate._claims) == 1
    _pin(engine, "a")
    assert not gate._victims and not gate._claims
    engine.source.auto = True
    engine.source.deliver("b")
    engine.run()
    for number in (1, 2, 3):
        engine.assert_as_alone(number)
    assert "a" in engine.core.stats().resident


def test_pinning_the_same_again_changes_nothing_and_one_slot_is_left_to_others():
    engine = MemoryEngine(max_loras=3)
    _pin(engine, "p", "q")
    engine.run()
    _pin(engine, "q", "p")
    engine.run()
    assert engine.source.num_loads == 2
    with pytest.raises(ValueError, match="3 adapters to pin; at most 2"):
        _pin(engine, "p", "q", "r")
    assert sorted(engine.core.stats().resident) == ["p", "q"]
    with pytest.raises(ValueError, match="at most 0"):
        MemoryEngine(max_loras=1).core.pin(frozenset({"p"}))
    MemoryEngine(max_loras=0).core.pin(frozenset())


def test_a_pinned_adapter_that_cannot_be_had_is_tried_again_when_asked_for_and_not_before():
    engine = MemoryEngine(max_loras=2)
    engine.runner.broken_adapters.add("p")
    _pin(engine, "p")
    engine.run(max_steps=20)
    assert engine.core.stats().resident == []
    engine.runner.broken_adapters.clear()
    engine.add(request(1, [1], adapter="p"))
    engine.run()
    engine.assert_as_alone(1)
    assert engine.core.stats().resident == ["p"]


def test_unloading_a_pinned_adapter_waits_until_it_is_pinned_no_more():
    engine = MemoryEngine(max_loras=2)
    _pin(engine, "p")
    engine.run()
    engine.core.unload("p")
    engine.run()
    assert engine.core.stats().resident == ["p"]
    _pin(engine)
    engine.run()
    assert engine.core.stats().resident == [] and engine.source.forgotten == ["p"]
