"""The step after the one that runs, planned before it is known what that one draws.

Only a step that decodes on can be known ahead: each row's token is what the row drew in the step
that runs, which the runner finds by the row's index. A row that then turns out to have ended (a
stop token, an abort) has been run once too often; what it drew is dropped when the step is
committed, and its blocks, freed by then, are written before anybody else's step runs.

Whatever else a step may do (admit, prefill, preempt, fork, change slots, follow a grammar) needs to
know. Then there is no plan, the step that runs is committed, and the next one is planned as ever.
"""

from engine.config import SchedulerConfig
from engine.lifecycle import Lifecycle
from engine.scheduled_batch import SamplingRow, ScheduledBatch, ScheduledRow
from engine.sequence import Sequence
from engine.step_plan import StepPlan

MAX_IN_A_ROW = 32
"""Steps planned ahead while somebody waits; then one is planned as ever, so that whatever changes
slowly (counters, what a wait is put down to) is seen."""
PENDING_TOKEN = 0
"""Stands for a token that the step before draws."""


def plan_ahead(
    current: StepPlan, lifecycle: Lifecycle, config: SchedulerConfig, num_in_a_row: int
) -> StepPlan | None:
    """Decode once more what runs, given the plan that is being run; None where it cannot be known.

    `num_in_a_row` steps were planned ahead up to now. Every row that goes on has its next block
    afterwards.
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
                return None  # it ends now, for sure, and somebody gets its seat
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
    """The plan as the runner gets it, before the step of `current` is committed."""
    index_of = {sequence: index for index, sequence in enumerate(current.grants)}
    return ScheduledBatch(
        rows=[_row(sequence, block_size) for sequence in plan.grants],
        follows=[index_of[sequence] for sequence in plan.grants],
    )


def _is_admission_shut(lifecycle: Lifecycle, config: SchedulerConfig) -> bool:
    """Whether nobody could be admitted, nor be promised a slot, while all that runs goes on."""
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
