"""What all policies share: decoding prefilled sequences, and the order of half-prefilled ones."""

from functools import cmp_to_key

from engine.scheduling.fair_order import comes_before
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import StepPlan


def decode_all(plan: StepPlan, lifecycle: Lifecycle) -> None:
    """Grant one token to every sequence that has been prefilled.

    If a sequence lacks its next block, sequences of the most served tenant are preempted until it
    has one; the sequence itself may be among them.
    """
    blocks, block_size = lifecycle.blocks, lifecycle.blocks.block_size
    for sequence in list(lifecycle.running):
        if sequence.num_computed < sequence.prefill_length or sequence.finished:
            continue
        num_tokens = len(sequence.token_ids)
        if num_tokens <= len(sequence.block_table) * block_size and not plan.lacks_blocks:
            plan.grant(sequence, 1)  # the usual case; the same as below, but faster
            continue
        while sequence.is_running:
            has_room = num_tokens <= len(sequence.block_table) * block_size
            if has_room or blocks.grow(sequence.block_table, num_tokens):
                plan.grant(sequence, 1)
                break
            victim = lifecycle.running.victim()
            lifecycle.preempt(victim, for_blocks=True)
            plan.withdraw(victim)


def half_prefilled(lifecycle: Lifecycle) -> list[Sequence]:
    """Running sequences whose prefill is incomplete, in the order of service."""
    begun = [s for s in lifecycle.running if s.num_computed < s.prefill_length]
    return sorted(begun, key=cmp_to_key(lambda a, b: -1 if comes_before(a, b) else 1))
