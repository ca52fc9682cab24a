"""A row's adjustments as a list of token ids and what happens to each, for a device to apply.

Has the same effect as `adjustments` has on a row of logits on the host, and the same errors.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.sampling.adjustments import (
    check_biases,
    check_ids,
    check_penalties,
    ending_token_ids,
    has_penalties,
)
from engine.scheduled_batch import SamplingRow

Entries = npt.NDArray[np.int32]
"""[count, 3]: token id; bits of its float32 bias; and 4 * how often it is in the output
+ 2 * whether it must not be drawn + whether it is in prompt or output. No id occurs twice."""
IS_SEEN, IS_BANNED, TIMES_SHIFT = 1, 2, 2


def adjustment_entries(
    row: SamplingRow, eos_token_ids: Sequence[int], vocab_size: int
) -> Entries | None:
    """The row's entries; None if nothing is adjusted.

    Raises ValueError, naming the parameter, for ids outside the vocabulary and for numbers that
    are not finite.
    """
    params = row.params
    nothing = np.empty(0, dtype=np.int64)
    biased, seen, drawn, banned = nothing, nothing, nothing, nothing
    biases = np.empty(0, dtype=np.float32)
    if params.logit_bias:
        biased = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        biases = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        check_ids("logit_bias", biased, vocab_size)
        check_biases(biases)
    if has_penalties(params):
        check_penalties(params)
        seen = np.fromiter(row.token_ids, np.int64, len(row.token_ids))
        drawn = seen[row.num_prompt_tokens :]
        check_ids("token_ids", seen, vocab_size)
    if row.output_position < params.min_tokens:
        banned = np.array(ending_token_ids(params, eos_token_ids), dtype=np.int64)
        check_ids("stop_token_ids", banned, vocab_size)
    token_ids = np.unique(np.concatenate((biased, seen, banned)))
    if not len(token_ids):
        return None
    entries = np.zeros((len(token_ids), 3), dtype=np.int32)
    entries[:, 0] = token_ids
    added = np.zeros(len(token_ids), dtype=np.float32)
    added[np.searchsorted(token_ids, biased)] = biases
    entries[:, 1] = added.view(np.int32)
    uses = entries[:, 2]
    uses[np.searchsorted(token_ids, seen)] |= IS_SEEN
    uses[np.searchsorted(token_ids, banned)] |= IS_BANNED
    uses += np.bincount(np.searchsorted(token_ids, drawn), minlength=len(uses)).astype(
        np.int32
    ) << (TIMES_SHIFT)
    return entries
