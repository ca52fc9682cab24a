"""Draws the next token of every row of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.scheduled_batch import SampledRow, SamplingRow


class Sampler:
    """Turns logits into tokens, each row on its own: neighbours never change a row's result."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """Draw a token for each choice of each row.

        `logits`: [num_rows, vocab_size], float32 or bfloat16, row i belongs to `rows[i]`; not
        changed. A row that cannot be sampled (logits that are not finite, parameters out of range)
        gets an `error`; the others are not touched by it.
        """
        raise NotImplementedError
