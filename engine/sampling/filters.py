"""Top-k, top-p and min-p: which tokens a draw may choose from.

In transformers' order, after temperature: top-k, then top-p over what top-k left, then min-p. All
three keep the tokens above some score, so equal scores are kept or dropped together: a result never
depends on the order in which a sort or a partial sort leaves ties.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """Tokens to draw from, a row each."""

    scores: Tensor
    """[num_rows, num_candidates], float32; -inf for a token that may not be drawn."""
    token_ids: Tensor
    """[num_rows, num_candidates], int64."""


class Nucleus(NamedTuple):
    """What `top_k_top_p` found."""

    candidates: Candidates
    is_complete: Tensor
    """[num_rows] bool: False where the row needs a larger table to be decided."""


def scale_by_temperature(scores: Tensor, temperatures: Tensor) -> Tensor:
    """`scores / temperature`, shifted so that the best score is exactly 0; softmax is the same.

    `scores`: [num_rows, vocab_size], float32; `temperatures`: [num_rows], above 0. The shift keeps
    a small temperature from overflowing.
    """
    best = scores.amax(dim=-1, keepdim=True)
    return (scores - best) / temperatures.unsqueeze(1)


def top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, table_size: int) -> Nucleus:
    """Keep the `top_k` best, then the fewest of these that hold `top_p` of their probability.

    `scores`: [num_rows, vocab_size], float32, as `scale_by_temperature` returns them; `top_k`:
    [num_rows] int64, 0 for off; `top_p`: [num_rows] float32, 1 for off. Only the `table_size` best
    scores are sorted (a whole vocabulary takes 10 ms and more): a row that keeps tokens beyond
    them, or might, is reported as not complete and must be called again with more.
    """
    vocab_size = scores.shape[1]
    table_size = min(table_size, vocab_size)
    values, token_ids = scores.topk(table_size, dim=-1)
    has_k = ((top_k > 0) & (top_k < vocab_size)).unsqueeze(1)
    kth_index = (top_k - 1).clamp(0, table_size - 1).unsqueeze(1)
    in_k = (values >= values.gather(1, kth_index)) | ~has_k

    # softmax, unlike sum and logsumexp, is bit-equal for a row whatever the number of rows.
    probs = torch.softmax(scores, dim=-1).gather(1, token_ids).masked_fill(~in_k, 0.0)
    mass_up_to = probs.cumsum(dim=-1)
    mass_before = torch.nn.functional.pad(mass_up_to[:, :-1], (1, 0))
    total = torch.where(has_k, mass_up_to[:, -1:], 1.0)
    limit = top_p.unsqueeze(1)
    in_p = (mass_before < limit * total) | (limit >= 1.0)
    in_p[:, 0] = True

    num_kept = (in_k & in_p).sum(dim=-1, keepdim=True)
    lowest = values.gather(1, num_kept - 1)
    if table_size == vocab_size:
        is_complete = torch.ones_like(top_k, dtype=torch.bool)
    else:
        # A tie with the table's last entry may go on outside it.
        is_complete = (lowest.squeeze(1) > values[:, -1]) & ~((top_k > table_size) & has_k[:, 0])
    return Nucleus(
        Candidates(values.masked_fill(values < lowest, -math.inf), token_ids), is_complete
    )


def min_p_(scores: Tensor, min_p: Tensor) -> None:
    """Drop tokens less probable than `min_p` [num_rows] times the best one; in place.

    `scores`: [num_rows, count], float32, best at 0, so exp(score) is the ratio. The best stays.
    """
    scores.masked_fill_(scores < min_p.log().clamp(max=0.0).unsqueeze(1), -math.inf)
