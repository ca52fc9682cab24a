"""A step in the making: which sequences run how many tokens, within the token budget."""

from engine.scheduled_batch import ScheduledBatch, ScheduledRow
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import Sequence


class StepPlan:
    """How many tokens each sequence runs, in the order of the batch's rows."""

    def __init__(self, max_tokens: int) -> None:
        self.grants: dict[Sequence, int] = {}
        self.fillers: list[ScheduledRow] = []
        """Rows whose results are dropped (the static policy's padding); they follow the grants."""
        self._filled: dict[Sequence, int] = {}
        self.remaining = max_tokens
        """Tokens of the budget that were not granted yet."""
        self.preempted: list[int] = []
        self.lacks_blocks = False
        """Whether a decode found no free block, so that a sequence was preempted."""

    def grant(self, sequence: Sequence, num_tokens: int, cost: int | None = None) -> None:
        """Run the next `num_tokens` of a sequence, on top of what it was granted before.

        They take `cost` of the budget; None: one each.
        """
        assert 0 < num_tokens <= self.remaining
        grants = self.grants
        grants[sequence] = grants[sequence] + num_tokens if sequence in grants else num_tokens
        self.remaining -= num_tokens if cost is None else cost

    def fill(self, sequence: Sequence, row: ScheduledRow) -> None:
        """Add a row of a sequence that is computed although its result is dropped."""
        self.fillers.append(row)
        self._filled[sequence] = self._filled.get(sequence, 0) + len(row.token_ids)
        self.remaining -= len(row.token_ids)

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence was preempted for its blocks: take back what it was granted."""
        self.lacks_blocks = True
        self.remaining += self.grants.pop(sequence, 0)
        self.preempted.append(sequence.sequence_id)

    def share_time(self, nanoseconds: int) -> None:
        """Charge the time of the step to its requests, in proportion to their tokens."""
        num_tokens = sum(self.grants.values()) + sum(self._filled.values())
        for computed in (self.grants, self._filled):
            for sequence, number in computed.items():
                sequence.request.engine_ns += nanoseconds * number / num_tokens

    def batch(self, blocks: BlockManager, slots: AdapterSlots) -> ScheduledBatch:
        """The plan as the runner gets it, with the slot changes and block copies that are due."""
        cleared_slots, loads = slots.take_changes()
        block_size = blocks.block_size
        rows = [sequence.row(n, block_size) for sequence, n in self.grants.items()]
        rows += self.fillers
        return ScheduledBatch(
            cleared_slots=cleared_slots,
            loads=loads,
            block_copies=blocks.take_copies() if rows else [],
            rows=rows,
            preempted=self.preempted,
        )
