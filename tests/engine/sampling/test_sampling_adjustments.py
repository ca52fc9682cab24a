import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.sampling.adjustments import adjust_logits, ending_token_ids, has_adjustments
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow

VOCAB = 100
EOS = (2, 5)
PROMPT = [1, 7, 7, 9, 30]
OUTPUT = [30, 31, 31, 31, 64]


def make_row(output=OUTPUT, **params) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(max_tokens=16, seed=0, **params),
        choices=(0,),
        token_ids=[*PROMPT, *output],
        num_prompt_tokens=len(PROMPT),
    )


def random_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def adjusted(row: SamplingRow, logits: torch.Tensor) -> torch.Tensor:
    result = logits.clone()
    adjust_logits(result, row, EOS)
    return result


def processed(processors: list, logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    ids = torch.tensor([list(row.token_ids)])
    return LogitsProcessorList(processors)(ids, logits.clone().unsqueeze(0))[0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_equals_transformers_over_prompt_and_output(penalty):
    logits = random_logits()
    row = make_row(repetition_penalty=penalty)
    expected = processed([RepetitionPenaltyLogitsProcessor(penalty)], logits, row)
    assert torch.equal(adjusted(row, logits), expected)
    assert not torch.equal(expected, logits)


def test_bias_and_repetition_penalty_come_in_transformers_order():
    logits = random_logits()
    bias = {7: 6.0, 31: -8.0, 50: 100.0}
    row = make_row(repetition_penalty=1.7, logit_bias=bias)
    expected = processed(
        [
            SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.7),
        ],
        logits,
        row,
    )
    assert torch.equal(adjusted(row, logits), expected)


@pytest.mark.parametrize("min_tokens", [4, 5, 6])
def test_min_tokens_masks_as_transformers_until_that_many_exist(min_tokens):
    logits = random_logits()
    row = make_row(min_tokens=min_tokens, stop_token_ids=(11,))
    expected = processed(
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [*EOS, 11], device="cpu")],
        logits,
        row,
    )
    assert torch.equal(adjusted(row, logits), expected)
    assert math.isinf(expected[5]) == (min_tokens > len(OUTPUT))


def test_ids_that_cannot_end_the_choice_are_not_masked():
    row = make_row(min_tokens=9, stop_token_ids=(11,), ignore_eos=True)
    result = adjusted(row, random_logits())
    assert torch.isneginf(result).nonzero().flatten().tolist() == [11]
    assert ending_token_ids(row.params, EOS) == [11]


def test_frequency_and_presence_penalties_follow_the_openai_formula_over_the_output_only():
    logits = random_logits()
    row = make_row(frequency_penalty=0.3, presence_penalty=-1.1)
    counts = np.bincount(OUTPUT, minlength=VOCAB)
    expected = logits.double().numpy() - counts * 0.3 - (counts > 0) * -1.1
    np.testing.assert_allclose(adjusted(row, logits).numpy(), expected, rtol=0, atol=1e-6)
    assert adjusted(row, logits)[7] == logits[7]


def test_first_token_has_no_output_to_penalise():
    logits = random_logits()
    row = make_row(output=[], frequency_penalty=2.0, presence_penalty=2.0)
    assert torch.equal(adjusted(row, logits), logits)


def test_plain_rows_need_no_adjustment():
    assert not has_adjustments(make_row())
    assert not has_adjustments(make_row(min_tokens=len(OUTPUT)))
    for params in (
        {"min_tokens": len(OUTPUT) + 1},
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ):
        assert has_adjustments(make_row(**params))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"stop_token_ids": (VOCAB,), "min_tokens": 9}, "stop_token_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
    ],
)
def test_bad_values_are_refused_by_name(params, name):
    with pytest.raises(ValueError, match=name):
        adjusted(make_row(**params), random_logits())
