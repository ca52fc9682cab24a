"""Preemption for blocks: who goes, who comes back, and that no token changes."""

from typing import cast

from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import StepPlan
from tests.support.memory_engine import MemoryEngine, request


def test_a_small_pool_preempts_and_changes_no_token():
    engine = MemoryEngine(num_kv_blocks=14, block_size=4, max_num_seqs=8)
    for number in range(8):
        engine.add(
            request(
                number,
                [1 + number] * (5 + number),
                tenant=f"t{number % 3}",
                adapter=[None, "a", "b", "c"][number % 4],
                max_tokens=20,
            )
        )
    engine.run()
    assert engine.core.stats().preemptions > 0
    for number in range(8):
        engine.assert_as_alone(number)
    preempted = [engine.last(number).timing.preemptions for number in range(8)]
    assert sum(preempted) == engine.core.stats().preemptions
    engine.assert_at_rest()


def test_admission_never_preempts():
    engine = MemoryEngine(num_kv_blocks=6, block_size=4, max_num_seqs=4)
    engine.add(request(1, [1] * 12, tenant="a", max_tokens=4))
    engine.step()
    engine.add(request(2, [2] * 12, tenant="b", max_tokens=4))
    engine.run()
    assert engine.core.stats().preemptions == 0
    assert engine.first_token_at[2] > engine.finished_at[1] - 1


def test_a_head_leaves_room_for_its_first_decode_or_waits():
    engine = MemoryEngine(num_kv_blocks=5, block_size=4, max_num_seqs=4)
    engine.add(request(1, [1] * 9, tenant="a", max_tokens=3))
    engine.step()
    engine.add(request(2, [2] * 8, tenant="b", max_tokens=3))
    engine.run()
    assert engine.core.stats().preemptions == 0
    assert engine.first_token_at[2] > engine.finished_at[1]


def test_nobody_is_admitted_into_the_blocks_of_a_sequence_preempted_in_the_same_step():
    engine = MemoryEngine(num_kv_blocks=9, block_size=4, max_num_seqs=8)
    engine.add(request(1, [1] * 7, tenant="x", max_tokens=24))
    engine.add(request(2, [2] * 15, tenant="x", max_tokens=20))
    for number in range(3, 12):
        engine.step()
        engine.add(request(number, [number] * 3, tenant="y", max_tokens=4))
    engine.run()
    preempting = [batch for batch in engine.runner.batches if batch.preempted]
    assert preempting
    for batch in preempting:
        before = engine.runner.batches[engine.runner.batches.index(batch) - 1]
        assert {row.sequence_id for row in batch.rows} <= {r.sequence_id for r in before.rows}
        assert not {row.sequence_id for row in batch.rows} & set(batch.preempted)
    for number in range(1, 12):
        engine.assert_as_alone(number)


def test_a_stream_that_lost_its_blocks_comes_back_before_anybody_new_is_admitted():
    engine = MemoryEngine(num_kv_blocks=12, block_size=4, max_num_seqs=8)
    for number in (1, 2, 3):
        engine.add(request(number, [number] * 7, tenant="x", max_tokens=24))
    for number in range(10, 40):
        # Tenants that were never served, and so go before the one that is, with small requests.
        engine.add(request(number, [5, 6], tenant=f"new-{number}", max_tokens=4))
        engine.step()
    engine.run()
    known: set[int] = set()
    lost: set[int] = set()
    num_returns = 0
    for batch in engine.runner.batches:
        lost |= set(batch.preempted)
        rows = {row.sequence_id for row in batch.rows}
        num_returns += len(lost & rows)
        lost -= rows
        assert not (lost and rows - known), "somebody new, while a stream waits for its blocks"
        known |= rows
    assert num_returns >= 3 and len(known) == 33
    for message in engine.messages.values():
        engine.assert_as_alone(message.request_id)


def test_a_withdrawn_grant_gives_its_tokens_back():
    class Granted:
        sequence_id = 7

    plan, sequence = StepPlan(10), cast(Sequence, Granted())
    plan.grant(sequence, 4)
    plan.withdraw(sequence)
    assert (plan.remaining, plan.preempted, plan.grants) == (10, [7], {})


def test_the_newest_sequence_of_the_most_served_tenant_is_preempted():
    engine = MemoryEngine(num_kv_blocks=7, block_size=4, max_num_seqs=4)
    engine.add(request(1, [1] * 7, tenant="greedy", max_tokens=16))
    engine.add(request(2, [2] * 7, tenant="greedy", max_tokens=16))
    engine.step()
    engine.add(request(3, [3] * 3, tenant="modest", max_tokens=16))
    engine.run()
    preemptions = {number: engine.last(number).timing.preemptions for number in (1, 2, 3)}
    assert preemptions[2] >= 1 and preemptions[3] == 0


def test_a_recompute_is_not_charged_and_cached_tokens_count_the_first_admission():
    engine = MemoryEngine(num_kv_blocks=7, block_size=4, max_num_seqs=4)
    for number in (1, 2, 3):
        engine.add(request(number, [number] * 7, max_tokens=16))
    engine.run()
    stats = engine.core.stats()
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.cached_tokens) == (21, 0)
    assert all(engine.last(number).num_cached_tokens == 0 for number in (1, 2, 3))
