import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling.filters import min_p_, scale_by_temperature, top_k_top_p

VOCAB = 1000
NUM_ROWS = 8
TABLES = (16, 300, VOCAB)


def random_scores(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ROWS, VOCAB, generator=generator) * 3


def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((NUM_ROWS,), value, dtype=dtype)


def filtered(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, table: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores over the whole vocabulary, and which rows the table decided."""
    scores = scale_by_temperature(logits, full(temperature))
    candidates, is_complete = top_k_top_p(scores, full(top_k, torch.int64), full(top_p), table)
    min_p_(candidates.scores, full(min_p))
    result = torch.full_like(logits, -math.inf)
    return result.scatter(1, candidates.token_ids, candidates.scores), is_complete


def warped(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())


def mass_before(logits: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    """Probability of all tokens better than each one, in float64."""
    ranked = (logits.double() / temperature).sort(dim=-1, descending=True)
    values = ranked.values
    if top_k:
        values[:, top_k:] = -math.inf
    probs = values.softmax(-1)
    return torch.empty_like(probs).scatter(1, ranked.indices, probs.cumsum(-1) - probs)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 1, 1.0, 0.0),
        (1.0, 12, 1.0, 0.0),
        (2.5, 200, 1.0, 0.0),
        (1.0, VOCAB, 1.0, 0.0),
        (1.0, 10 * VOCAB, 0.7, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.5, 0, 0.99, 0.0),
        (1.0, 0, 0.001, 0.0),
        (0.8, 40, 0.8, 0.0),
        (1.3, 200, 0.95, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 0, 1.0, 1.0),
        (0.6, 50, 0.95, 0.1),
        (2.0, 0, 0.9, 0.02),
    ],
)
def test_kept_tokens_and_probabilities_equal_transformers(temperature, top_k, top_p, min_p):
    for seed in range(5):
        logits = random_scores(seed)
        expected = warped(logits, temperature, top_k, top_p, min_p)
        decided = torch.zeros(NUM_ROWS, dtype=torch.bool)
        for table in TABLES:
            scores, is_complete = filtered(logits, temperature, top_k, top_p, min_p, table)
            rows = is_complete.nonzero().squeeze(1)
            differ = torch.isneginf(scores[rows]) != torch.isneginf(expected[rows])
            same = rows[~differ.any(-1)]
            torch.testing.assert_close(
                scores[same].softmax(-1), expected[same].softmax(-1), rtol=1e-5, atol=1e-7
            )
            if len(same) < len(rows):
                # Both sum in float32, from opposite ends: rounding may move the last token.
                assert top_p < 1
                before = mass_before(logits[rows], temperature, top_k)[differ]
                assert ((before - top_p).abs() < 1e-6).all()
            decided |= is_complete
        assert decided.all()


def test_a_small_table_decides_narrow_rows_only():
    logits = random_scores(0)
    _, narrow = filtered(logits, 1.0, 12, 1.0, 0.0, 16)
    _, wide = filtered(logits, 1.0, 17, 1.0, 0.0, 16)
    assert narrow.all()
    assert not wide.any()


def test_equal_scores_are_kept_or_dropped_together():
    logits = torch.zeros(NUM_ROWS, VOCAB)
    logits[:, 500] = 1.0
    for top_k, top_p in ((3, 1.0), (0, 0.5)):
        _, small = filtered(logits, 1.0, top_k, top_p, 0.0, 16)
        assert not small.any()
        scores, whole = filtered(logits, 1.0, top_k, top_p, 0.0, VOCAB)
        assert whole.all()
        assert torch.isfinite(scores).all()
    scores, _ = filtered(logits, 1.0, 1, 1.0, 0.0, 16)
    assert torch.isfinite(scores).nonzero()[:, 1].tolist() == [500] * NUM_ROWS


def test_top_p_zero_keeps_the_best_token():
    scores, is_complete = filtered(random_scores(1), 1.0, 0, 0.0, 0.0, 16)
    assert is_complete.all()
    assert torch.isfinite(scores).sum(-1).tolist() == [1] * NUM_ROWS


def test_a_tiny_temperature_does_not_overflow():
    scores = scale_by_temperature(random_scores(0) * 1e30, full(1e-5))
    assert not scores.isnan().any()
    assert (scores.amax(-1) == 0).all()


def test_settings_are_per_row():
    logits = random_scores(2)
    top_k = torch.tensor([0, 1, 5, 50, 0, 7, 0, 200])
    top_p = torch.tensor([0.5, 1.0, 0.9, 0.9, 1.0, 0.2, 0.99, 1.0])
    scores = scale_by_temperature(logits, full(1.0))
    candidates, is_complete = top_k_top_p(scores, top_k, top_p, VOCAB)
    assert is_complete.all()
    for row in range(NUM_ROWS):
        expected = warped(logits[row : row + 1], 1.0, int(top_k[row]), float(top_p[row]), 0.0)
        kept = candidates.token_ids[row][torch.isfinite(candidates.scores[row])]
        assert sorted(kept.tolist()) == torch.isfinite(expected[0]).nonzero().squeeze(1).tolist()
