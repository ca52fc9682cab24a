"""One choice of a request: its tokens, how far they are computed, and the blocks they fill.

Ranges of positions, where `length` is the number of prompt and output tokens:

    0 .. num_computed             K/V is in the blocks of `block_table`
    num_computed .. length        to be computed: one token in a decode, more in a prefill
    num_prompt_tokens .. length   output, which survives preemptions

Until a request forks, its only sequence stands for all `n` choices.
"""

from enum import Enum

from engine.grammar.cursor import GrammarCursor
from engine.messages import FinishReason
from engine.scheduled_batch import SamplingRow, ScheduledRow
from engine.scheduling.request import Request
from engine.scheduling.wait_causes import Reading


class SequenceState(Enum):
    """Where a sequence is. Only `engine.scheduling.lifecycle` moves it."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Token ids and counters, which `engine.scheduling.lifecycle` and the scheduler change."""

    __slots__ = (
        "block_hashes", "block_table", "choices", "finished", "is_resuming", "num_computed",
        "num_prompt_tokens", "num_published", "params", "prefill_length", "request",
        "sampling_row", "sequence_id", "slot", "state", "token_ids", "wait_began",
    )  # fmt: skip

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        choices: tuple[int, ...],
        token_ids: list[int],
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.params = request.message.sampling
        self.num_prompt_tokens = len(request.message.prompt_token_ids)
        self.token_ids = token_ids
        self.block_table: list[int] = []
        self.num_computed = 0
        self.prefill_length = 0
        """Tokens to compute before this admission's first draw."""
        self.block_hashes: list[bytes] = []
        self.num_published = 0
        """Leading blocks whose hashes the prefix cache has been told."""
        self.slot: int | None = None
        self.state = SequenceState.WAITING
        self.finished = False
        """Whether its output is complete; under the static policy it may run on."""
        self.is_resuming = False
        """Whether it lost its blocks while it ran; then nobody is admitted before it runs again."""
        self.wait_began: Reading = ()
        self.stand_for(choices)

    def stand_for(self, choices: tuple[int, ...]) -> None:
        """Draw for these choices from now on."""
        self.choices = choices
        grammar = self.params.grammar
        self.sampling_row = SamplingRow(
            self.params,
            choices,
            self.token_ids,
            self.num_prompt_tokens,
            None if grammar is None else GrammarCursor(grammar, self.request.message.tenant),
        )

    @property
    def num_seats(self) -> int:
        """Seats (of `max_num_seqs`) that it takes: one for each choice it stands for."""
        return len(self.choices)

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """Output tokens it may still draw."""
        return self.params.max_tokens - self.num_output_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next draw; at least one while it runs."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_running(self) -> bool:
        """Whether it holds blocks, a seat and, with an adapter, a slot reference."""
        return self.state is SequenceState.RUNNING

    @property
    def is_prefilling(self) -> bool:
        """Whether its prefill is incomplete."""
        return self.num_computed < self.prefill_length

    @property
    def num_drawn(self) -> int:
        """Tokens drawn since it was last admitted."""
        return max(0, len(self.token_ids) - self.prefill_length)

    def finish_reason(
        self, eos_token_ids: frozenset[int], max_sequence_len: int
    ) -> FinishReason | None:
        """Why the choice ends with the token drawn last; None if it goes on."""
        params, token_ids = self.params, self.token_ids
        if token_ids[-1] in eos_token_ids and not params.ignore_eos:
            return "stop"
        if token_ids[-1] in params.stop_token_ids:
            return "stop"
        num_output_tokens = len(token_ids) - self.num_prompt_tokens
        is_full = len(token_ids) >= max_sequence_len
        return "length" if is_full or num_output_tokens >= params.max_tokens else None

    def row(self, num_tokens: int, block_size: int) -> ScheduledRow:
        """The next `num_tokens` as a row; it samples if they are all that is left."""
        token_ids, table, start = self.token_ids, self.block_table, self.num_computed
        end = start + num_tokens
        num_blocks = -(-end // block_size)
        return ScheduledRow(
            self.sequence_id,
            token_ids[start:end],
            start,
            table if len(table) == num_blocks else table[:num_blocks],
            self.slot,
            self.sampling_row if end == len(token_ids) else None,
        )
