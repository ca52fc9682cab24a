"""What every policy does in a step: decode what is prefilled, and order what is not."""

from functools import cmp_to_key

from engine.fair_order import comes_before
from engine.lifecycle import Lifecycle
from engine.sequence import Sequence
from engine.step_plan import StepPlan


def decode_all(plan: StepPlan, lifecycle: Lifecycle) -> None:
    """Grant one token to every sequence that has been prefilled.

    A sequence that lacks its next block has others preempted until it has one, or is preempted
    itself: whoever belongs to the most served tenant goes.
    """
    for sequence in [s for s in lifecycle.running if not s.is_prefilling and not s.finished]:
        while sequence.is_running:
            if lifecycle.blocks.grow(sequence.block_table, len(sequence.token_ids)):
                plan.grant(sequence, 1)
                break
            victim = lifecycle.running.victim()
            lifecycle.preempt(victim)
            plan.withdraw(victim)


def half_prefilled(lifecycle: Lifecycle) -> list[Sequence]:
    """Running sequences whose prefill is incomplete, in the order of service."""
    begun = [sequence for sequence in lifecycle.running if sequence.is_prefilling]
    return sorted(begun, key=cmp_to_key(lambda a, b: -1 if comes_before(a, b) else 1))
