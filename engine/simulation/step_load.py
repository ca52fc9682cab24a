"""What a step asks of a machine: rows, tokens, context and adapters, summed over its rows."""

from dataclasses import dataclass

from engine.scheduled_batch import ScheduledBatch


@dataclass(slots=True)
class StepLoad:
    """Sums over the rows of a step; a row runs tokens at positions `start .. end - 1`."""

    num_rows: int = 0
    num_tokens: int = 0
    context: int = 0
    """Sum of `end`: the positions whose K/V the rows read or write."""
    pairs: int = 0
    """Pairs of a query and a key at or before it, over all rows."""
    longest_prompt: int = 0
    """Of the rows that sample, in tokens."""
    longest_output: int = 0
    """Of the rows that sample: tokens that they have drawn before."""
    num_adapters: int = 0
    """Different adapters."""
    lora_tokens: int = 0
    """Tokens of rows with an adapter."""

    def add(self, start: int, num_tokens: int) -> None:
        """Add a row."""
        self.num_rows += 1
        self.num_tokens += num_tokens
        self.context += start + num_tokens
        self.pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2

    def add_sampled(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Note that one of the rows samples."""
        self.longest_prompt = max(self.longest_prompt, num_prompt_tokens)
        self.longest_output = max(self.longest_output, num_output_tokens)

    def next_decode(self, num_growing: int, longest_growing: int) -> None:
        """From a step of decodes to the next one, in which so many rows are a token further.

        `longest_growing`: what the longest of them has drawn by then.
        """
        self.context += num_growing
        self.pairs += num_growing
        self.longest_output = max(self.longest_output, longest_growing)

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "StepLoad":
        """A batch's load."""
        load = cls()
        slots: set[int] = set()
        for row in batch.rows:
            load.add(row.start, len(row.token_ids))
            if row.slot is not None:
                slots.add(row.slot)
                load.lora_tokens += len(row.token_ids)
            if row.sampling is not None:
                load.add_sampled(row.sampling.num_prompt_tokens, row.sampling.output_position)
        load.num_adapters = len(slots)
        return load
