"""Plans the step after the running one before it is known which tokens the running step draws.

That works only if the next step does nothing but decode on. Each of its rows then runs the token
that the same sequence draws in the running step, which the runner looks up by the row's index. If a
row turns out to have ended (a stop token, an abort), it has run once too often: what it drew is
dropped at commit, and its blocks, freed by then, are written before any other step reads them.

Everything else that a step may do (admit, prefill, preempt, fork, change slots, follow a grammar)
depends on the drawn tokens. In that case nothing is planned ahead: the running step is committed,
and the next one is planned as usual.
"""

from engine.config import SchedulerConfig
from engine.scheduled_batch import SamplingRow, ScheduledBatch, ScheduledRow
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import StepPlan

MAX_IN_A_ROW = 32
"""Steps that are planned ahead in a row while somebody waits. Then one is planned as usual, so that
slow changes (of counters, of the causes of waits) are noticed."""
PENDING_TOKEN = 0
"""Placeholder for a token that the step before draws."""


def plan_ahead(
    current: StepPlan, lifecycle: Lifecycle, config: SchedulerConfig, num_in_a_row: int
) -> StepPlan | None:
    """A plan that decodes every running sequence once more; None where that is too early.

    `current` is the plan that runs now, `num_in_a_row` how many steps in a row were planned ahead
    so far. Afterwards every row of the new plan has the block that its token needs.
    """
    if config.policy == "static" or current.fillers or lifecycle.slots.has_notices:
        return None
    if lifecycle.waiting.num_waiting and (
        num_in_a_row >= MAX_IN_A_ROW or not _is_admission_shut(lifecycle, config)
    ):
        return None
    blocks, block_size = lifecycle.blocks, lifecycle.blocks.block_size
    plan = StepPlan(config.max_num_batched_tokens)
    num_running, growing = 0, list[Sequence]()
    for sequence, num_tokens in current.grants.items():
        if not sequence.is_running:
            continue
        num_running += 1
        length = len(sequence.token_ids)
        draws = sequence.num_computed + num_tokens == length
        if not draws or sequence.num_seats > 1 or sequence.params.reads_history:
            return None
        if length + 1 - sequence.num_prompt_tokens >= sequence.params.max_tokens or (
            length + 1 >= config.max_sequence_len
        ):
            if lifecycle.waiting.num_waiting:
                return None  # it ends for certain, and somebody else gets its seat
            continue
        if length + 1 > len(sequence.block_table) * block_size:
            growing.append(sequence)
        plan.grant(sequence, 1)
    if not plan.grants or num_running != len(lifecycle.running) or len(growing) > blocks.num_free:
        return None
    for sequence in growing:
        blocks.grow(sequence.block_table, len(sequence.token_ids) + 1)
    return plan


def ahead_batch(current: StepPlan, plan: StepPlan, block_size: int) -> ScheduledBatch:
    """The batch of a plan made by `plan_ahead`, before `current` is committed."""
    index_of = {sequence: index for index, sequence in enumerate(current.grants)}
    return ScheduledBatch(
        rows=[_row(sequence, block_size) for sequence in plan.grants],
        follows=[index_of[sequence] for sequence in plan.grants],
    )


def _is_admission_shut(lifecycle: Lifecycle, config: SchedulerConfig) -> bool:
    """Whether nobody could be admitted or promised a slot while all running sequences go on."""
    waiting, gate = lifecycle.waiting, lifecycle.gate
    is_full = lifecycle.running.num_seats >= config.max_num_seqs
    return (
        (is_full or (waiting.ready.min() is None and waiting.resuming.min() is None))
        and gate.oldest_claim is None
        and waiting.unplaced.min() is None
        and not (gate.can_hasten and waiting.unfetched.min() is not None)
    )


def _row(sequence: Sequence, block_size: int) -> ScheduledRow:
    length, table = len(sequence.token_ids), sequence.block_table
    num_blocks = -(-(length + 1) // block_size)
    sampling = SamplingRow(
        sequence.params,
        sequence.choices,
        (),
        sequence.num_prompt_tokens,
        position=length + 1 - sequence.num_prompt_tokens,
    )
    return ScheduledRow(
        sequence.sequence_id,
        (PENDING_TOKEN,),
        length,
        tuple(table[:num_blocks]),
        sequence.slot,
        sampling,
    )
