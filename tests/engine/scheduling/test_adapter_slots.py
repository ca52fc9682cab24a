"""Slots: their states by themselves, and adapters that share steps and take turns."""

import pytest

from engine.scheduled_batch import SlotLoad
from engine.scheduling.adapter_slots import AdapterSlots, SlotState
from tests.support.memory_engine import MemoryEngine, request


def _resident(slots: AdapterSlots, digest: str) -> None:
    slots.want(digest)
    slots.assign(digest)
    slots.installed(digest)


def test_an_adapter_goes_from_absent_over_loading_to_resident_and_back_by_draining():
    slots = AdapterSlots(1)
    assert slots.state("a") is SlotState.ABSENT
    slots.want("a")
    slots.assign("a")
    assert slots.state("a") is SlotState.LOADING
    assert slots.take_changes() == ([], [SlotLoad(0, "a")])
    slots.installed("a")
    assert slots.acquire("a") == 0
    slots.drain("a")
    assert slots.state("a") is SlotState.DRAINING and not slots.has_spare
    slots.release("a")
    assert slots.state("a") is SlotState.ABSENT and slots.has_spare
    assert slots.take_changes() == ([0], [])
    slots.check_integrity([], ["a"])


def test_an_unwanted_adapter_stays_until_its_slot_is_needed_longest_idle_first():
    slots = AdapterSlots(2)
    for digest in ("a", "b"):
        _resident(slots, digest)
    slots.take_changes()
    slots.unwant("b")
    slots.unwant("a")
    assert slots.take_notices().released == ["b", "a"]
    slots.want("c")
    slots.assign("c")
    assert slots.state("b") is SlotState.ABSENT and slots.state("a") is SlotState.RESIDENT
    assert slots.take_changes() == ([1], [SlotLoad(1, "c")])
    slots.check_integrity([], ["c"])


def test_wanting_an_idle_adapter_again_keeps_it():
    slots = AdapterSlots(1)
    _resident(slots, "a")
    slots.unwant("a")
    slots.want("a")
    assert not slots.has_spare
    assert slots.take_notices().released == []


def test_a_load_that_fails_or_is_wanted_no_more_frees_its_slot():
    for end in ("fail", "unwant"):
        slots = AdapterSlots(1)
        slots.want("a")
        slots.assign("a")
        getattr(slots, end)("a")
        assert slots.has_spare
        assert slots.take_changes() == ([0], []), "nothing is loaded any more"


def test_unloading_waits_until_nobody_wants_it_also_of_those_that_come_late():
    slots = AdapterSlots(1)
    _resident(slots, "a")
    slots.unload("a")
    assert slots.take_notices().forgotten == []
    slots.unwant("a")
    assert slots.take_notices().forgotten == ["a"]
    assert slots.state("a") is SlotState.ABSENT

    _resident(slots, "b")
    slots.unload("b")
    slots.want("b")  # it was resolved before the version was deleted
    slots.unwant("b")
    assert slots.take_notices().forgotten == [] and slots.state("b") is SlotState.RESIDENT
    slots.unwant("b")
    assert slots.take_notices().forgotten == ["b"] and slots.state("b") is SlotState.ABSENT

    slots.unload("never seen")
    assert slots.take_notices().forgotten == ["never seen"]


@pytest.mark.parametrize(
    "order", [[0, 1, 2], [1, 0, 2], [1, 2, 0], [2, 2, 0], [0, 0, 0], [1, 1, 1]]
)
def test_rows_of_any_adapters_side_by_side_equal_their_runs_alone(order):
    adapters = [None, "a", "b"]
    engine = MemoryEngine(max_loras=2, max_num_seqs=4)
    for number, which in enumerate(order):
        engine.add(request(number, [7, 8, 9], adapter=adapters[which], max_tokens=3 + 2 * number))
    engine.run()
    for number in range(3):
        engine.assert_as_alone(number)


def test_adapters_evicted_while_their_sequences_are_preempted_change_no_token():
    engine = MemoryEngine(
        max_loras=1, num_kv_blocks=9, max_num_seqs=6, max_num_batched_tokens=16, slot_debt_tokens=10
    )
    for number in range(8):
        adapter = "ab"[number % 2]
        tenant = f"t{number % 3}"
        engine.add(request(number, [1, 2, 3], adapter=adapter, tenant=tenant, max_tokens=15))
    engine.run()
    assert engine.core.stats().preemptions > 0
    assert engine.source.num_loads >= 2 and len(engine.runner.batches) > 30
    for number in range(8):
        engine.assert_as_alone(number)
    engine.assert_at_rest()


def test_two_tenants_share_the_slot_of_equal_files_and_nothing_else():
    engine = MemoryEngine(max_loras=1)
    for number in range(2):
        engine.add(request(number, [1] * 9, adapter="same", tenant=f"t{number}"))
    engine.run()
    assert engine.source.num_loads == 1
    assert [engine.last(number).num_cached_tokens for number in range(2)] == [0, 0]
