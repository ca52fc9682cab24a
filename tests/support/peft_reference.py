"""The truth: greedy decoding by transformers + PEFT in float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GAP = 1e-4
"""A first difference is forgiven where the reference's own top-2 gap is below this."""


@dataclass(frozen=True)
class ReferenceRun:
    token_ids: list[int]
    gaps: list[float]
    """Difference of the two largest logits at each position."""


def greedy(model_dir: Path, adapter_dir: Path | None, prompt: Sequence[int], max_tokens: int) -> ReferenceRun:
    """Greedy ids (EOS ignored) and their top-2 gaps."""
    raise NotImplementedError


def assert_exact(token_ids: Sequence[int], reference: ReferenceRun) -> None:
    """Equal, or first different where the reference itself is undecided (gap < `GAP`)."""
    raise NotImplementedError
