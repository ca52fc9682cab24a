"""What a row's parameters ask of a sampler."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sampling_params import SamplingParams


_GREEDY_BELOW = 1e-5  # as in vLLM: a lower temperature changes nothing any more


def problem_of(params: "SamplingParams") -> str | None:
    """Why nothing can be drawn with these parameters; None if it can."""
    for name in ("temperature", "top_p", "min_p"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            return f"{name} is not a number of at least 0"
    return None


def is_greedy(params: "SamplingParams") -> bool:
    """Whether the best token is taken."""
    return params.temperature < _GREEDY_BELOW


def has_nucleus(params: "SamplingParams", vocab_size: int) -> bool:
    """Whether top-k or top-p leave tokens out."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0
