"""How a step divides its token budget between decodes and prefills.

`chunked`        stall-free: decodes first, then chunks of prefills in the rest of the budget
`prefill_first`  a step with any prefill in it holds no decodes (vLLM's original order)
`static`         request-level batches, see `engine.scheduling.static_policy`
"""

from typing import Protocol

from engine.config import SchedulerConfig
from engine.scheduling.admission import Admission
from engine.scheduling.fair_order import comes_before
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.sequence import Sequence
from engine.scheduling.static_policy import StaticPolicy
from engine.scheduling.step_parts import decode_all, half_prefilled
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.step_work import cost_of, tokens_within


class StepPolicy(Protocol):
    """Fills a step's plan."""

    keeps_finished: bool
    """Whether finished sequences stay in the batch until all of it has finished."""

    def fill(self, plan: StepPlan) -> None:
        """Grant tokens to running sequences, and to waiting ones after admitting them."""
        ...


def make_policy(config: SchedulerConfig, lifecycle: Lifecycle) -> StepPolicy:
    """The policy that the configuration names."""
    admission = Admission(lifecycle, config)
    match config.policy:
        case "chunked":
            return ChunkedPolicy(lifecycle, admission, config)
        case "prefill_first":
            return PrefillFirstPolicy(lifecycle, admission)
        case "static":
            return StaticPolicy(lifecycle, admission)


class ChunkedPolicy:
    """Every running sequence decodes in every step; prefills share what is left.

    They are served in counter order, half-prefilled rows and new heads alike, after heads whose
    reserved slot is ready or that were preempted for their blocks. None takes more than half while
    another waits. Tokens with much context cost more than one, see `engine.scheduling.step_work`.
    """

    keeps_finished = False

    def __init__(self, lifecycle: Lifecycle, admission: Admission, config: SchedulerConfig) -> None:
        self._lifecycle = lifecycle
        self._admission = admission
        self._attention_context = config.attention_context
        self._block_size = config.block_size

    def fill(self, plan: StepPlan) -> None:
        """See `StepPolicy`."""
        decode_all(plan, self._lifecycle)
        for sequence in self._share_prefills(plan):
            self._prefill(plan, sequence, plan.remaining)

    def _share_prefills(self, plan: StepPlan) -> list[Sequence]:
        half = -(-plan.remaining // 2)
        prefills: list[Sequence] = []
        begun = half_prefilled(self._lifecycle)
        # What was just preempted must not come back and take the blocks that it made room with.
        is_admitting = not plan.lacks_blocks
        if plan.lacks_blocks:
            self._admission.stop(self._admission.next_queue(), "kv")
        while True:
            queue = self._admission.next_queue() if is_admitting else None
            if not plan.remaining:
                if queue is not None:
                    self._admission.stop(queue, "budget")
                return prefills
            if begun and (queue is None or self._goes_first(begun[0], queue.head)):
                sequence = begun.pop(0)
            elif queue is None:
                return prefills
            else:
                sequence = self._admission.admit(queue)
                if sequence is None:
                    is_admitting = False
                    continue
            self._prefill(plan, sequence, min(half, plan.remaining))
            prefills.append(sequence)

    def _prefill(self, plan: StepPlan, sequence: Sequence, budget: int) -> None:
        granted = plan.grants.get(sequence, 0)
        left, context = sequence.num_uncomputed - granted, sequence.num_computed + granted
        if not left or not budget:
            return
        fitting = tokens_within(budget, context, self._attention_context, self._block_size)
        if fitting < left:
            # It has used up its part: no more than two prefills begin in a step and do not end.
            plan.grant(sequence, fitting, budget)
        else:
            plan.grant(sequence, left, min(budget, cost_of(left, context, self._attention_context)))

    def _goes_first(self, begun: Sequence, head: Sequence) -> bool:
        is_reserved = self._lifecycle.gate.is_reserved(head.request.queue)
        return not is_reserved and not head.is_resuming and comes_before(begun, head)


class PrefillFirstPolicy:
    """Prefills whole prompts as soon as they fit, and decodes only when none is to be prefilled.

    A prompt is cut only if it alone exceeds the budget.
    """

    keeps_finished = False

    def __init__(self, lifecycle: Lifecycle, admission: Admission) -> None:
        self._lifecycle = lifecycle
        self._admission = admission

    def fill(self, plan: StepPlan) -> None:
        """See `StepPolicy`."""
        for sequence in half_prefilled(self._lifecycle):
            if plan.remaining:
                plan.grant(sequence, min(sequence.num_uncomputed, plan.remaining))
        while (queue := self._admission.next_queue()) is not None:
            limit = plan.remaining if plan.grants else None
            sequence = self._admission.admit(queue, max_prefill_tokens=limit)
            if sequence is None:
                break
            plan.grant(sequence, min(sequence.num_uncomputed, plan.remaining))
        if not plan.grants:
            decode_all(plan, self._lifecycle)
