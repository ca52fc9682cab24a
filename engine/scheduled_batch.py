"""What one engine step runs: the scheduler's explicit answer, and the runner's reply to it."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.grammar.cursor import GrammarCursor

if TYPE_CHECKING:  # what lays steps out, and runs them, reads no parameters
    from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs to draw the next token of a row."""

    params: "SamplingParams"
    choices: tuple[int, ...]
    """Choice indices drawn from this row: one, or all `n` where a shared prefill ends."""
    token_ids: SequenceOf[int]
    """Prompt and output so far; the scheduler's live list, read during the step only."""
    num_prompt_tokens: int
    grammar: GrammarCursor | None = None
    """Where the output stands in its grammar; the sampler advances it."""
    position: int | None = None
    """For a row of a step planned ahead: the output index of the token to draw. The tokens before
    it were not drawn when the row was made, so its `token_ids` are empty; such a row samples by
    nothing that reads them."""

    @property
    def output_position(self) -> int:
        """Index of the token to draw within the output."""
        if self.position is not None:
            return self.position
        return len(self.token_ids) - self.num_prompt_tokens


class ScheduledRow(NamedTuple):
    """One sequence's part of a step: a decode token, or a chunk of its prefill.

    A tuple, because one is made for every row of every step: a frozen dataclass takes four times as
    long to make.
    """

    sequence_id: int
    token_ids: SequenceOf[int]
    """Tokens to run, [query_len]; at least one."""
    start: int
    """Position of `token_ids[0]`: how many tokens already have their K/V in the cache."""
    block_table: SequenceOf[int]
    """Blocks that hold positions 0 .. start + query_len - 1, in order."""
    slot: int | None
    """Adapter slot; None for the base model."""
    sampling: SamplingRow | None
    """None for a chunk that does not end the prefill."""


class SlotLoad(NamedTuple):
    """An adapter to bring into a slot; the slot holds nobody else's rows."""

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Effects are applied in the order of the fields."""

    cleared_slots: list[int] = field(default_factory=list[int])
    """Slots whose adapter has left: forget their weights."""
    loads: list[SlotLoad] = field(default_factory=list[SlotLoad])
    """Loads to start; none of their rows is in this batch."""
    block_copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(source, destination) KV blocks to copy before the forward pass (a fork's partial block)."""
    rows: list[ScheduledRow] = field(default_factory=list[ScheduledRow])
    follows: list[int] = field(default_factory=list[int])
    """For a step planned ahead: for each row, the index of the row of the step before whose drawn
    token it runs in place of its `token_ids`. Empty for any other step."""
    preempted: list[int] = field(default_factory=list[int])
    """Sequence ids that lost their blocks in this step."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(len(row.token_ids) for row in self.rows)


class SampledToken(NamedTuple):
    """One drawn token."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The tokens drawn for a row, one for each of its `choices`; or why there are none."""

    tokens: tuple[SampledToken, ...] = ()
    error: str | None = None
    error_code: str = "sampling_failed"
    is_deferred: bool = False
    """Nothing could be drawn yet (a grammar is still compiling): run the same tokens again in the
    next step."""


class RunSeconds(NamedTuple):
    """Where a runner's time went."""

    prepare: float
    """Rows to tensors, block copies."""
    lora: float
    """Adapters' updates, estimated where they were not measured."""
    sample: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each scheduled row, in order; None where the row samples nothing."""

    rows: list[SampledRow | None]
    seconds: RunSeconds | None = None
    """For statistics; the rest of the runner's time is the forward pass."""
