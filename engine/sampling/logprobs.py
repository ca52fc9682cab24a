"""Log-probabilities to report.

They are the model's own: log-softmax of the raw logits in float32, before bias, penalties, masks,
temperature and filters (vLLM's default, `raw_logprobs`, and what OpenAI clients expect).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.scheduled_batch import SampledToken


def sampled_tokens(
    logprobs: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[SampledToken, ...]:
    """Drawn `token_ids` of one row with their log-probabilities and the row's best `num_top`.

    `logprobs`: [vocab_size], float32. Equal log-probabilities are listed by id, lowest first.
    """
    top = _top(logprobs, min(num_top, logprobs.shape[0]))
    drawn = logprobs[torch.tensor(token_ids, device=logprobs.device)].tolist()
    return tuple(
        SampledToken(token_id, logprob, top)
        for token_id, logprob in zip(token_ids, drawn, strict=True)
    )


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    # topk leaves open which of several equal entries it takes: take all that reach the last value.
    lowest = logprobs.topk(count).values[-1]
    token_ids = (logprobs >= lowest).nonzero().squeeze(1)
    ranked = torch.sort(logprobs[token_ids], descending=True, stable=True).indices[:count]
    return tuple(zip(token_ids[ranked].tolist(), logprobs[token_ids[ranked]].tolist(), strict=True))
