"""The truth: greedy decoding by transformers + PEFT in float32."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

GAP = 1e-4
"""A first difference is forgiven where the reference's own top-2 gap is below this."""


@dataclass(frozen=True)
class ReferenceRun:
    token_ids: list[int]
    gaps: list[float]
    """Difference of the two largest logits at each position."""
    logits: torch.Tensor
    """[max_tokens, vocab] float32, of each position."""


class PeftReference:
    """One model, with one adapter or none, kept loaded for several prompts."""

    def __init__(self, model_dir: Path, adapter_dir: Path | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        if adapter_dir is not None:
            from peft import PeftModel

            with warnings.catch_warnings():
                # peft 0.21 reads an attribute that transformers 5.24 has renamed.
                warnings.simplefilter("ignore", FutureWarning)
                model = PeftModel.from_pretrained(model, adapter_dir)
        self._model = model.eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> ReferenceRun:
        """The ids that follow the prompt, EOS ignored."""
        token_ids: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(max_tokens):
            inputs = torch.tensor([[*prompt, *token_ids]])
            rows.append(self._model(input_ids=inputs, use_cache=False).logits[0, -1])
            token_ids.append(int(rows[-1].argmax()))
        logits = torch.stack(rows)
        best = logits.topk(2, dim=-1).values
        return ReferenceRun(token_ids, (best[:, 0] - best[:, 1]).tolist(), logits)


def greedy(
    model_dir: Path, adapter_dir: Path | None, prompt: Sequence[int], max_tokens: int
) -> ReferenceRun:
    """Greedy ids and their top-2 gaps for one prompt; see `PeftReference` for several."""
    return PeftReference(model_dir, adapter_dir).greedy(prompt, max_tokens)


def assert_exact(token_ids: Sequence[int], reference: ReferenceRun) -> None:
    """Equal, or first different where the reference itself is undecided (gap < `GAP`)."""
    assert len(token_ids) == len(reference.token_ids)
    for position, (got, expected) in enumerate(zip(token_ids, reference.token_ids, strict=True)):
        if got != expected:
            assert reference.gaps[position] < GAP, (
                f"token {position} is {got}, not {expected}, where the reference's top-2 gap is "
                f"{reference.gaps[position]:.2e}"
            )
            return
