"""Request-level batching, the baseline that continuous batching is measured against."""

from engine.scheduled_batch import ScheduledRow
from engine.scheduling.admission import Admission
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_parts import decode_all, half_prefilled
from engine.scheduling.step_plan import StepPlan


class StaticPolicy:
    """Starts a batch of up to `max_num_seqs` waiting sequences when the one before is over.

    Prompts are padded to the longest of the batch, and finished sequences decode on until all have
    finished. Both kinds of waste are really computed, as rows on the sequence's own blocks whose
    results are dropped. (A finished sequence that needs another block when none is left is not.)
    """

    keeps_finished = True

    def __init__(self, lifecycle: Lifecycle, admission: Admission) -> None:
        self._lifecycle = lifecycle
        self._admission = admission
        self._padding: dict[Sequence, range] = {}  # positions of padding still to be computed

    def fill(self, plan: StepPlan) -> None:
        """See `StepPolicy`."""
        if len(self._lifecycle.running):
            self._admission.stop(self._admission.next_queue(), "budget")
        else:
            self._dispatch()
        begun = half_prefilled(self._lifecycle)
        if begun:
            self._prefill(plan, begun)
            return
        decode_all(plan, self._lifecycle)
        for sequence in self._lifecycle.running:
            num_tokens = len(sequence.token_ids)
            if sequence.finished and self._lifecycle.blocks.grow(sequence.block_table, num_tokens):
                # Its last token again: costs as much as a decode with its whole context.
                row = self._row(sequence, sequence.token_ids[-1:], num_tokens - 1)
                plan.fill(sequence, row)

    def _dispatch(self) -> None:
        blocks = self._lifecycle.blocks
        batch: list[Sequence] = []
        longest = 0
        while (queue := self._admission.next_queue()) is not None:
            longest_with_head = max(longest, len(queue.head.token_ids))
            if (len(batch) + 1) * blocks.blocks_for(longest_with_head + 1) > blocks.num_blocks:
                self._admission.stop(queue, "kv")
                break
            sequence = self._admission.admit(queue)
            if sequence is None:
                break
            longest = longest_with_head
            batch.append(sequence)
        self._padding = {s: range(longest - len(s.token_ids)) for s in batch}
        for sequence in batch:
            blocks.grow(sequence.block_table, longest)

    def _prefill(self, plan: StepPlan, begun: list[Sequence]) -> None:
        for sequence in begun:
            if not plan.remaining:
                return
            padding = self._padding.get(sequence, range(0))
            if padding:
                # The prompt follows in a later step and overwrites these positions.
                now, self._padding[sequence] = padding[: plan.remaining], padding[plan.remaining :]
                row = self._row(sequence, sequence.token_ids[:1] * len(now), now.start)
                plan.fill(sequence, row)
            else:
                plan.grant(sequence, min(sequence.num_uncomputed, plan.remaining))

    def _row(self, sequence: Sequence, token_ids: list[int], start: int) -> ScheduledRow:
        num_blocks = self._lifecycle.blocks.blocks_for(start + len(token_ids))
        return ScheduledRow(
            sequence_id=sequence.sequence_id,
            token_ids=token_ids,
            start=start,
            block_table=sequence.block_table[:num_blocks],
            slot=sequence.slot,
            sampling=sequence.sampling_row if sequence.finished else None,
        )
