"""Who gets a slot, and at whose expense: reservations, claims, victims, and slots that go round."""

import pytest

from engine.scheduling.slot_gate import STINT_LOADS
from tests.support.memory_engine import FakeSource, MemoryEngine, request
from tests.support.memory_runner import running_sequences


def _steady(engine: MemoryEngine, adapter: str, number: int, **fields) -> None:
    engine.add(request(number, [1, 2, 3], adapter=adapter, **fields))


def _service(engine: MemoryEngine) -> float:
    stats = engine.core.stats()
    return stats.prompt_tokens - stats.cached_tokens + 2 * stats.output_tokens


@pytest.mark.parametrize("same_tenant", [False, True])
@pytest.mark.parametrize("debt", [0, 100, 400])
def test_one_b_is_served_within_its_bound_against_a_steady_flow_of_a(debt, same_tenant):
    engine = MemoryEngine(
        max_loras=1, max_num_seqs=4, max_num_batched_tokens=16, slot_debt_tokens=debt
    )
    number = 0

    def feed(until: int) -> None:
        nonlocal number
        while number < until:
            number += 1
            _steady(engine, "a", number, tenant="a", max_tokens=40)

    feed(12)
    for step in range(40):
        feed(12 + step // 3)
        engine.step()
    before = _service(engine)
    _steady(engine, "b", 10_000, tenant="a" if same_tenant else "b", max_tokens=3)
    steps = 0
    while 10_000 not in engine.first_token_at:
        steps += 1
        feed(number + (steps % 3 == 0))
        engine.step()
    # U for the inputs and for the outputs of a full batch, the debt limit, and what one step adds
    # before the debt is looked at and while the weights are copied.
    unit = max(3, 2 * 4)
    per_step = 16 + 2 * 4
    assert _service(engine) - before <= 2 * unit + debt + 3 * per_step
    for other in list(engine.first_token_at):
        if engine.is_over(("c", other)):
            engine.assert_as_alone(other)
    engine.run()
    engine.assert_at_rest()
    engine.assert_as_alone(10_000)


def test_with_time_to_drain_and_no_seat_to_spare_nobody_is_preempted_for_a_slot():
    engine = MemoryEngine(max_loras=1, max_num_seqs=1, slot_debt_tokens=1000)
    _steady(engine, "a", 1, max_tokens=20)
    engine.step()
    _steady(engine, "b", 2)
    _steady(engine, "a", 3, max_tokens=20)
    engine.run()
    assert engine.core.stats().preemptions == 0
    assert engine.finished_at[1] < engine.first_token_at[2] < engine.first_token_at[3]


def test_two_looping_adapters_on_two_slots_cannot_keep_a_third_out():
    engine = MemoryEngine(
        max_loras=2, max_num_seqs=4, max_num_batched_tokens=16, slot_debt_tokens=64
    )
    number = 0

    def loop() -> None:
        """Keep one request of A and one of B waiting at all times."""
        nonlocal number
        for adapter in ("a", "b"):
            if sum(not engine.is_over(key) for key in engine.messages) < 8:
                number += 1
                _steady(engine, adapter, number, tenant=adapter, max_tokens=30)

    for _ in range(30):
        loop()
        engine.step()
    _steady(engine, "late", 10_000, tenant="late", max_tokens=4)
    before = _service(engine)
    while 10_000 not in engine.first_token_at:
        loop()
        engine.step()
    assert _service(engine) - before <= 2 * 8 + 64 + 3 * 24
    engine.run()
    for key in engine.messages:
        engine.assert_as_alone(key[1])
    engine.assert_at_rest()


def test_a_reserved_slots_head_goes_first_and_a_seat_is_kept_for_it():
    engine = MemoryEngine(max_loras=2, max_num_seqs=3, source=FakeSource(auto=False))
    # z is charged as it runs; a weight so large that the base's tenant comes before it at any time.
    engine.add(request(0, [1], max_tokens=20, tenant="z"))
    engine.add(request(1, [1], max_tokens=20, tenant="base", weight=1e6))
    engine.add(request(2, [1], max_tokens=6, tenant="base", weight=1e6))
    engine.step()
    _steady(engine, "a", 3, tenant="z")
    engine.source.deliver("a")
    engine.step()
    engine.add(request(4, [1], tenant="base", weight=1e6))
    engine.run()
    assert engine.first_token_at[3] == engine.finished_at[2] + 1, "the first seat is its own"
    assert engine.first_token_at[4] > engine.first_token_at[3]


def test_a_reserved_slots_head_goes_before_half_prefilled_rows_too():
    engine = MemoryEngine(max_loras=1, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(request(1, [1] * 90, tenant="base", weight=1e6))
    engine.step()
    _steady(engine, "a", 2, tenant="z")
    while 2 not in engine.first_token_at:
        engine.step()
    rows = engine.runner.batches[-1].rows
    assert [row.slot for row in rows] == [0, None], "and the half-prefilled row gets the rest"
    engine.run()
    engine.assert_as_alone(1)
    engine.assert_as_alone(2)


def test_a_claim_ends_when_its_tenants_own_limit_is_reached():
    engine = MemoryEngine(max_loras=1, max_num_seqs=4, slot_debt_tokens=10_000)
    _steady(engine, "a", 1, tenant="x", max_tokens=30)
    engine.step()
    _steady(engine, "b", 2, tenant="y", max_concurrent=1)
    engine.step()
    _steady(engine, "a", 3, tenant="x")
    engine.step()
    assert 3 not in engine.first_token_at, "its adapter is the claim's victim"
    engine.add(request(4, [4], tenant="y", max_concurrent=1, max_tokens=12))
    engine.step()
    engine.step()
    assert 3 in engine.first_token_at, "a tenant that cannot run holds nobody's slot up"
    engine.run()
    for number in range(1, 5):
        engine.assert_as_alone(number)


def test_service_goes_on_past_a_queue_that_lacks_only_a_slot():
    engine = MemoryEngine(max_loras=1, max_num_seqs=8, slot_debt_tokens=10_000)
    _steady(engine, "a", 1, max_tokens=30)
    engine.step()
    _steady(engine, "b", 2, tenant="u")
    for number in range(3, 6):
        engine.add(request(number, [number], tenant="v"))
    engine.step()
    assert {3, 4, 5} <= set(engine.first_token_at), "base rows need no slot"
    assert 2 not in engine.first_token_at
    engine.run()
    for number in range(1, 6):
        engine.assert_as_alone(number)


def test_slots_go_round_while_seats_and_blocks_are_to_spare():
    engine = MemoryEngine(max_loras=2, max_num_seqs=8, slot_debt_tokens=10_000, num_kv_blocks=200)
    for number in range(3):
        _steady(engine, f"a{number}", number, tenant=f"t{number}", max_tokens=3 * STINT_LOADS)
    while len(engine.first_token_at) < 3:
        engine.step()
    assert not engine.finished_at, "each had its turn before the first was over"
    engine.run()
    assert engine.core.stats().preemptions > 2
    ends = [engine.finished_at[number] for number in range(3)]
    assert min(ends) > 0.6 * max(ends), "they share the slots"
    for number in range(3):
        engine.assert_as_alone(number)
        assert engine.last(number).timing.queue["slot"] > 0


def test_a_slot_goes_round_only_after_a_stint():
    engine = MemoryEngine(max_loras=1, max_num_seqs=8, slot_debt_tokens=10_000, num_kv_blocks=200)
    for number in (0, 1):
        _steady(engine, f"a{number}", number, tenant=f"t{number}", max_tokens=3 * STINT_LOADS)
    engine.run()
    assert 2 <= engine.core.stats().preemptions <= 4, "each but the last stint of either ends so"
    for number in (0, 1):
        engine.assert_as_alone(number)


@pytest.mark.parametrize(("has_cache", "num_sequences"), [(True, 3), (False, 1), (False, 3)])
def test_a_stint_is_as_much_longer_as_blocks_would_have_to_be_computed_again(
    has_cache, num_sequences
):
    engine = MemoryEngine(
        max_loras=1, max_num_seqs=8, slot_debt_tokens=10_000, num_kv_blocks=400, block_size=8,
        max_num_batched_tokens=512, enable_prefix_cache=has_cache,
    )  # fmt: skip
    for number in range(num_sequences):
        prompt = [number + 1] * 80
        engine.add(request(number, prompt, tenant="x", adapter="a", max_tokens=100))
    engine.step()
    _steady(engine, "b", 9, tenant="y")
    before = {}
    while not engine.core.stats().preemptions:
        before = running_sequences(engine.core)
        drawn = [sequence.num_drawn for sequence in before.values()]
        computed = [sequence.num_computed for sequence in before.values()]
        engine.step()
    assert len(before) == num_sequences == engine.core.stats().preemptions
    num_lost = 0 if has_cache else sum(tokens // 8 for tokens in computed)
    assert set(drawn) == {STINT_LOADS + num_lost}, "a load takes one step here"
    engine.run()
    for number in [*range(num_sequences), 9]:
        engine.assert_as_alone(number)


def test_slots_go_round_also_after_a_load_that_had_to_wait_for_its_files():
    engine = MemoryEngine(max_loras=1, max_num_seqs=8, slot_debt_tokens=10_000, num_kv_blocks=300)
    engine.add(request(0, [1], tenant="base", max_tokens=600))
    _steady(engine, "slow", 1)
    del engine.source.in_host["slow"]  # before it has its slot, which waits for it then
    engine.source.auto = False
    while len(engine.runner.batches) < 500:
        engine.step()
    engine.source.deliver("slow")
    engine.source.auto = True
    for number in (2, 3):
        _steady(engine, f"a{number}", number, tenant=f"t{number}", max_tokens=8 * STINT_LOADS)
    engine.run()
    assert engine.core.stats().preemptions > 1
    for number in (0, 1, 2, 3):
        engine.assert_as_alone(number)


def test_slots_do_not_go_round_while_many_tenants_ask_for_one():
    engine = MemoryEngine(max_loras=2, max_num_seqs=8, slot_debt_tokens=10_000, num_kv_blocks=200)
    for number in range(6):
        _steady(engine, f"a{number}", number, tenant=f"t{number}", max_tokens=3 * STINT_LOADS)
    while not engine.finished_at:
        engine.step()
    assert len(engine.first_token_at) == 2 and engine.core.stats().preemptions == 0
    engine.run()
    for number in range(6):
        engine.assert_as_alone(number)


def test_while_slots_are_all_that_is_short_the_fewest_sequences_are_paused():
    engine = MemoryEngine(max_loras=2, max_num_seqs=12, slot_debt_tokens=10_000, num_kv_blocks=200)
    for number in (1, 2, 3):
        _steady(engine, "many", number, tenant="x", max_tokens=60)
    _steady(engine, "few", 4, tenant="y", max_tokens=60)
    for _ in range(20):
        engine.step()
    _steady(engine, "new", 5, tenant="z", max_tokens=4)
    while 5 not in engine.first_token_at:
        engine.step()
    assert sorted(engine.core.stats().resident) == ["many", "new"]
    assert engine.core.stats().preemptions == 1
    engine.run()
    for number in range(1, 6):
        engine.assert_as_alone(number)


def test_whose_tenant_is_far_ahead_is_not_spared_for_its_many_sequences():
    engine = MemoryEngine(max_loras=2, max_num_seqs=12, slot_debt_tokens=60, num_kv_blocks=200)
    for number in (1, 2, 3):
        _steady(engine, "many", number, tenant="x", max_tokens=60)
    _steady(engine, "few", 4, tenant="y", max_tokens=60)
    for _ in range(20):
        engine.step()
    _steady(engine, "new", 5, tenant="z", max_tokens=30)
    while 5 not in engine.first_token_at:
        engine.step()
    assert sorted(engine.core.stats().resident) == ["few", "new"]
    engine.run()
    for number in range(1, 6):
        engine.assert_as_alone(number)


def test_the_victim_is_the_most_served_adapter():
    engine = MemoryEngine(max_loras=2, max_num_seqs=4, slot_debt_tokens=60, num_kv_blocks=200)
    for number in (1, 2, 3):
        _steady(engine, "often", number, tenant="x", max_tokens=60)
    _steady(engine, "seldom", 4, tenant="y", max_tokens=60)
    for _ in range(20):
        engine.step()
    _steady(engine, "new", 5, tenant="z", max_tokens=60)
    while 5 not in engine.first_token_at:
        engine.step()
    assert sorted(engine.core.stats().resident) == ["new", "seldom"]
    engine.run()
    assert engine.last(1).timing.preemptions >= 1
    for number in range(1, 6):
        engine.assert_as_alone(number)


def test_claims_are_limited_in_all_and_to_one_for_a_tenant():
    engine = MemoryEngine(max_loras=8, max_num_seqs=16, slot_debt_tokens=10_000, num_kv_blocks=400)
    for number in range(8):
        _steady(engine, f"held{number}", number, tenant=f"t{number}", max_tokens=200)
    for _ in range(4):
        engine.step()
    assert len(engine.core.stats().resident) == 8
    for number in range(10, 16):
        _steady(engine, f"more{number}", number, tenant="one")
    for number in range(20, 24):
        _steady(engine, f"more{number}", number, tenant=f"u{number}")
    engine.step()
    gate = engine.core._scheduler._lifecycle.gate  # pyright: ignore
    assert len(gate._claims) == 2, "max(1, 8 // 4)"
    engine.run()
    for key in engine.messages:
        engine.assert_as_alone(key[1])


def test_a_claim_that_is_aborted_spares_its_victim():
    engine = MemoryEngine(max_loras=1, max_num_seqs=2, slot_debt_tokens=10_000)
    _steady(engine, "a", 1, max_tokens=20)
    engine.step()
    _steady(engine, "b", 2)
    engine.step()
    _steady(engine, "a", 3, max_tokens=4)
    engine.step()
    assert 3 not in engine.first_token_at, "a draining adapter admits nothing more"
    engine.core.abort("c", 2)
    engine.step()
    assert 3 in engine.first_token_at
    engine.run()
    assert engine.source.num_loads == 2 and engine.core.stats().resident == ["a"]


def test_running_half_prefilled_and_arriving_never_hold_more_slots_than_there_are():
    engine = MemoryEngine(max_loras=2, max_num_seqs=4, max_num_batched_tokens=8)
    _steady(engine, "a", 1, max_tokens=20, tenant="a")
    _steady(engine, "b", 2, max_tokens=20, tenant="b")
    for _ in range(3):
        engine.step()
    engine.add(request(3, [3] * 30, adapter="b", tenant="b"))
    engine.step()
    assert any(len(row.token_ids) > 1 for row in engine.runner.batches[-1].rows)
    _steady(engine, "c", 4, tenant="c")
    engine.add(request(5, [5], tenant="base"))
    while engine.core.has_work:
        engine.step()
        assert len(engine.runner.slots) <= 2 and len(engine.core.stats().resident) <= 2
        used = {row.slot for row in engine.runner.batches[-1].rows if row.slot is not None}
        assert len(used) <= 2
    for number in range(1, 6):
        engine.assert_as_alone(number)
