"""What changes a row's logits before temperature: bias, penalties, the mask of `min_tokens`.

In the order of transformers' processors: `logit_bias` (its SequenceBiasLogitsProcessor), repetition
penalty, then OpenAI's frequency and presence penalties, then the mask (its
MinNewTokensLengthLogitsProcessor).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.scheduled_batch import SamplingRow

if TYPE_CHECKING:
    from engine.sampling_params import SamplingParams


def has_adjustments(row: SamplingRow) -> bool:
    """Whether `adjust_logits` would change anything."""
    params = row.params
    return (
        bool(params.logit_bias) or has_penalties(params) or row.output_position < params.min_tokens
    )


def adjust_logits(logits: Tensor, row: SamplingRow, eos_token_ids: Sequence[int]) -> None:
    """Apply a row's adjustments to its raw `logits` [vocab_size], float32, in place.

    Raises ValueError, naming the parameter, for ids outside the vocabulary and for numbers that
    are not finite.
    """
    params = row.params
    vocab_size = logits.shape[0]
    if params.logit_bias:
        _add_bias(logits, params.logit_bias)
    if has_penalties(params):
        token_ids = np.fromiter(row.token_ids, dtype=np.int64, count=len(row.token_ids))
        check_ids("token_ids", token_ids, vocab_size)
        _apply_penalties(logits, params, token_ids, row.num_prompt_tokens)
    if row.output_position < params.min_tokens:
        ending = np.array(ending_token_ids(params, eos_token_ids), dtype=np.int64)
        check_ids("stop_token_ids", ending, vocab_size)
        logits[torch.from_numpy(ending).to(logits.device)] = -math.inf


def ending_token_ids(params: "SamplingParams", eos_token_ids: Sequence[int]) -> list[int]:
    """Ids that would end a choice: stop ids, and the model's EOS ids unless they are ignored."""
    ending = set(params.stop_token_ids)
    if not params.ignore_eos:
        ending.update(eos_token_ids)
    return sorted(ending)


def has_penalties(params: "SamplingParams") -> bool:
    """Whether tokens that came before change the logits."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _add_bias(logits: Tensor, logit_bias: dict[int, float]) -> None:
    token_ids = np.fromiter(logit_bias.keys(), dtype=np.int64, count=len(logit_bias))
    biases = np.fromiter(logit_bias.values(), dtype=np.float32, count=len(logit_bias))
    check_ids("logit_bias", token_ids, logits.shape[0])
    check_biases(biases)
    logits[torch.from_numpy(token_ids).to(logits.device)] += torch.from_numpy(biases).to(
        logits.device
    )


def _apply_penalties(
    logits: Tensor, params: "SamplingParams", token_ids: np.ndarray, num_prompt_tokens: int
) -> None:
    check_penalties(params)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(token_ids).to(logits.device)
        penalised = logits[seen]
        # An id that occurs twice is written twice, with the same value: it is penalised once.
        logits[seen] = torch.where(
            penalised < 0,
            penalised * params.repetition_penalty,
            penalised / params.repetition_penalty,
        )
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        drawn, counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        penalty = counts * params.frequency_penalty + params.presence_penalty
        logits[torch.from_numpy(drawn).to(logits.device)] -= torch.from_numpy(
            penalty.astype(np.float32)
        ).to(logits.device)


def check_penalties(params: "SamplingParams") -> None:
    """Raise ValueError for a penalty that nothing can be multiplied by or lowered by."""
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        raise ValueError("repetition_penalty is not a number above 0")
    if not math.isfinite(params.frequency_penalty + params.presence_penalty):
        raise ValueError("frequency_penalty or presence_penalty is not finite")


def check_biases(biases: np.ndarray) -> None:
    """Raise ValueError for a bias that is not finite."""
    if not np.isfinite(biases).all():
        raise ValueError("logit_bias holds a number that is not finite")


def check_ids(name: str, token_ids: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError for an id outside of the vocabulary."""
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"{name}: token id {outside[0]} is outside the vocabulary of {vocab_size} ids"
        )
