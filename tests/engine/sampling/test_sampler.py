import math
import random

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SampledRow, SamplingRow
from tests.support.decoder_ops import make_ops, ops_names

VOCAB = 5003
EOS = (2,)


def make_row(tokens=(1, 7, 9, 30, 31), prompt=3, choices=(0,), **params) -> SamplingRow:
    params = {"max_tokens": 64, "seed": 1, **params}
    return SamplingRow(SamplingParams(**params), choices, list(tokens), prompt)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3


def mixed_rows(count: int, seed: int = 0) -> list[SamplingRow]:
    """Rows over all parameters, so that every group of the sampler is mixed."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))]
        rows.append(
            make_row(
                [*prompt, *output],
                len(prompt),
                choices=rng.choice([(0,), (0,), (3,), (0, 1, 2)]),
                seed=rng.getrandbits(63),
                temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
                top_k=rng.choice([0, 0, 1, 50, 300, VOCAB, 10 * VOCAB]),
                top_p=rng.choice([1.0, 1.0, 0.1, 0.9, 0.999]),
                min_p=rng.choice([0.0, 0.0, 0.1]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
                presence_penalty=rng.choice([0.0, 0.5]),
                frequency_penalty=rng.choice([0.0, 0.2]),
                logit_bias=rng.choice([{}, {}, {5: 3.0, 4000: -100.0}]),
                min_tokens=rng.choice([0, 10]),
                logprobs=rng.choice([None, None, 0, 5]),
            )
        )
    return rows


def ids(results: list[SampledRow]) -> list[list[int]]:
    assert all(result.error is None for result in results)
    return [[token.token_id for token in result.tokens] for result in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", sorted({ops_names()[0], ops_names()[-1]}))
def test_a_row_gets_the_same_bits_alone_and_in_any_crowd(dtype, num_threads, name):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        sampler = Sampler(VOCAB, EOS, make_ops(name))
        rows = mixed_rows(60)
        logits = random_logits(60).to(dtype)
        crowd = sampler.sample(logits, rows)
        assert all(result.error is None for result in crowd)
        alone = [sampler.sample(logits[i : i + 1].clone(), rows[i : i + 1])[0] for i in range(60)]
        assert alone == crowd
        order = list(range(60))
        random.Random(3).shuffle(order)
        shuffled = sampler.sample(logits[order], [rows[i] for i in order])
        assert [shuffled[order.index(i)] for i in range(60)] == crowd
    finally:
        torch.set_num_threads(before)


def test_greedy_takes_the_best_and_of_equals_the_lowest_id():
    logits = random_logits(4).clamp(max=9.0)
    logits[:, [4000, 77, 78, 3000]] = 20.0
    plain, biased, first_filtered, with_logprobs = Sampler(VOCAB, EOS).sample(
        logits,
        [
            make_row(temperature=0.0),
            make_row(temperature=0.0, logit_bias={77: -1.0}),
            make_row(temperature=0.0, top_k=2, top_p=0.1),
            make_row(temperature=0.0, logprobs=4),
        ],
    )
    assert ids([plain, biased, first_filtered]) == [[77], [78], [77]]
    assert with_logprobs.tokens[0].token_id == 77
    assert [token_id for token_id, _ in with_logprobs.tokens[0].top] == [77, 78, 3000, 4000]


def test_draws_follow_the_distribution_of_transformers_pipeline():
    vocab = 40
    logits = random_logits(1, vocab, seed=5)
    params = {
        "temperature": 1.4,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.5,
    }
    prompt = [3, 8, 9]
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.5),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.02),
        ]
    )
    expected = processors(torch.tensor([prompt]), logits.clone())[0].softmax(-1)

    num_draws = 20_000
    row = make_row(prompt, 3, choices=tuple(range(num_draws)), **params)
    (drawn,) = ids(Sampler(vocab, EOS).sample(logits, [row]))
    counts = torch.bincount(torch.tensor(drawn), minlength=vocab).double()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    assert kept.sum() > 5
    mean = expected[kept].double() * num_draws
    statistic = float(((counts[kept] - mean) ** 2 / mean).sum())
    freedom = int(kept.sum()) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", ops_names())
def test_pure_temperature_draws_follow_softmax(name):
    vocab, num_draws, num_seeds = 30, 4_000, 25
    logits = random_logits(1, vocab, seed=6) / 2
    mean = logits[0].double().softmax(-1) * num_draws
    sampler = Sampler(vocab, EOS, make_ops(name))
    statistic = 0.0
    for seed in range(num_seeds):
        row = make_row(choices=tuple(range(num_draws)), seed=seed)
        (drawn,) = ids(sampler.sample(logits, [row]))
        counts = torch.bincount(torch.tensor(drawn), minlength=vocab).double()
        statistic += float(((counts - mean) ** 2 / mean).sum())
    freedom = (vocab - 1) * num_seeds
    # Both ways: counts that fit too well are no independent draws.
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_a_draw_depends_on_seed_choice_and_position_only():
    sampler = Sampler(VOCAB, EOS)
    flat = torch.zeros(1, VOCAB)

    def draw(**row) -> list[int]:
        return ids(sampler.sample(flat, [make_row(**row)]))[0]

    assert draw() == draw(tokens=(9, 8, 7, 6, 5))
    assert draw() == draw(tokens=(1, 2, 3), prompt=1)
    assert len({draw()[0], draw(seed=2)[0], draw(choices=(1,))[0], draw(prompt=2)[0]}) == 4
    assert draw(choices=(0, 1, 2)) == [draw(choices=(choice,))[0] for choice in range(3)]


@pytest.mark.parametrize("name", ops_names())
def test_asking_for_logprobs_changes_no_token(name):
    logits = random_logits(60, seed=7).to(torch.bfloat16)
    sampler = Sampler(VOCAB, EOS, make_ops(name))

    def tokens(**params) -> list[list[int]]:
        rows = [
            make_row(choices=(0, 1), seed=seed, temperature=0.5 + seed % 3, **params)
            for seed in range(60)
        ]
        return ids(sampler.sample(logits, rows))

    assert tokens() == tokens(logprobs=2)
    assert tokens(min_p=0.1) == tokens(min_p=0.1, logprobs=0)


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits(2)
    expected = torch.log_softmax(logits.double(), -1)
    row = make_row(
        temperature=0.4, top_k=5, logit_bias={11: 50.0}, repetition_penalty=2.0, logprobs=7
    )
    greedy = make_row(temperature=0.0, logprobs=0)
    forced, best = Sampler(VOCAB, EOS).sample(logits, [row, greedy])
    assert forced.tokens[0].token_id == 11
    assert forced.tokens[0].logprob == pytest.approx(float(expected[0, 11]), abs=1e-5)
    values, token_ids = expected[0].topk(7)
    assert [token_id for token_id, _ in forced.tokens[0].top] == token_ids.tolist()
    assert [value for _, value in forced.tokens[0].top] == pytest.approx(values.tolist(), abs=1e-5)
    assert best.tokens[0].top == ()
    assert best.tokens[0].logprob == pytest.approx(float(expected[1].max()), abs=1e-5)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"logprobs": 2}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_fail_their_row_only(params, value):
    sampler = Sampler(VOCAB, EOS)
    logits = random_logits(3)
    rows = [make_row(seed=seed, **params) for seed in range(3)]
    good = sampler.sample(logits, rows)
    logits[1, 4321] = value
    left, failed, right = sampler.sample(logits, rows)
    assert failed.error is not None
    assert "finite" in failed.error
    assert failed.tokens == ()
    assert [left, right] == [good[0], good[2]]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"min_tokens": 9, "stop_token_ids": (VOCAB + 5,)}, "stop_token_ids"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1e309}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"repetition_penalty": 1e-45}, "overflow"),
        ({"tokens": (1, VOCAB, 3, 4), "repetition_penalty": 1.5}, "token_ids"),
    ],
)
def test_a_bad_parameter_fails_its_row_only(params, reason):
    sampler = Sampler(VOCAB, EOS)
    logits = random_logits(3)
    rows = [make_row(seed=1), make_row(seed=2, **params), make_row(seed=3, top_k=9)]
    left, failed, right = sampler.sample(logits, rows)
    assert failed.error is not None
    assert reason in failed.error
    assert [left, right] == sampler.sample(logits[[0, 2]], [rows[0], rows[2]])


def test_a_row_whose_every_token_is_masked_fails():
    vocab = 4
    row = make_row((0, 1), 1, min_tokens=5, stop_token_ids=(0, 1, 2, 3))
    (result,) = Sampler(vocab, EOS).sample(torch.zeros(1, vocab), [row])
    assert result.error is not None
    assert "no token is left" in result.error


def test_masked_tokens_are_never_drawn():
    vocab = 6
    row = make_row(
        (0,), 1, choices=tuple(range(200)), min_tokens=1, stop_token_ids=(0, 1), top_p=0.9
    )
    (drawn,) = ids(Sampler(vocab, EOS).sample(torch.zeros(1, vocab), [row]))
    assert set(drawn) == {3, 4, 5}


def test_the_logits_given_are_not_changed():
    logits = random_logits(20)
    before = logits.clone()
    Sampler(VOCAB, EOS).sample(logits, mixed_rows(20, seed=4))
    assert torch.equal(logits, before)


def test_no_rows_and_wrong_shapes():
    sampler = Sampler(VOCAB, EOS)
    assert sampler.sample(torch.empty(0, VOCAB), []) == []
    with pytest.raises(ValueError, match="shape"):
        sampler.sample(random_logits(2), [make_row()])
    with pytest.raises(ValueError, match="shape"):
        sampler.sample(random_logits(1, VOCAB + 1), [make_row()])
