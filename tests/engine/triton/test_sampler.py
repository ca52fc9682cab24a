"""Drawing in Triton's interpreter: the tokens of the sampler on the host, and its errors."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.grammar.cursor import GrammarCursor
from engine.grammar.grammars import GrammarError
from engine.sampling.noise import exponential_noise, random_bits, stream_key
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow
from engine.triton import noise
from engine.triton.sampler import DeviceSampler

VOCAB = 1000
EOS = 2
CHUNK = 512


def row(
    *,
    prompt: tuple[int, ...] = (1, 2, 3, 2),
    output: tuple[int, ...] = (5, 5, 6),
    choices: tuple[int, ...] = (0,),
    grammar: GrammarCursor | None = None,
    **params: Any,
) -> SamplingRow:
    fields = {"max_tokens": 9, "seed": 3, **params}
    return SamplingRow(SamplingParams(**fields), choices, [*prompt, *output], len(prompt), grammar)


def logits_of(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return values.to(dtype)


def device_sampler(**options: Any) -> DeviceSampler:
    return DeviceSampler(VOCAB, (EOS,), "cpu", chunk_size=CHUNK, **options)


ROWS = [
    row(temperature=0.0),
    row(),
    row(temperature=0.7, top_p=0.9),
    row(top_k=5, seed=9),
    row(top_k=50, top_p=0.8, min_p=0.02, choices=(0, 1, 2)),
    row(top_k=1, choices=(3,)),
    row(top_p=0.0, temperature=3.0),
    row(top_k=VOCAB + 5, temperature=2.0),
    row(min_p=0.3),
    row(min_p=1.5),
    row(temperature=1e-4),
    row(logprobs=3, seed=4),
    row(temperature=0.0, logprobs=0),
    row(
        repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, temperature=0.5,
        logit_bias={7: 3.0, 5: -2.0, VOCAB - 1: 1.0}, logprobs=5,
    ),
    row(min_tokens=5, temperature=0.0, stop_token_ids=(8,)),
    row(repetition_penalty=0.7, temperature=0.0, prompt=tuple(range(600)), output=(600, 601)),
]  # fmt: skip


def test_tokens_are_those_of_the_host():
    logits = logits_of(len(ROWS))
    logits[14, EOS], logits[14, 8] = 50.0, 60.0  # both would end the choice too early
    kept = logits.clone()
    draw = device_sampler().launch(logits, ROWS)
    got = draw.result()
    expected = Sampler(VOCAB, (EOS,)).sample(logits, ROWS)
    assert torch.equal(logits, kept)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.error is None and theirs.error is None
        for one, other in zip(mine.tokens, theirs.tokens, strict=True):
            assert one.token_id == other.token_id
            assert (one.logprob is None) == (other.logprob is None)
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
            assert [t for t, _ in one.top] == [t for t, _ in other.top]
            assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=2e-5)
    assert draw.token_ids.tolist() == [result.tokens[0].token_id for result in got]


def test_a_row_draws_the_same_alone_and_in_any_place():
    logits = logits_of(len(ROWS))
    together = device_sampler().sample(logits, ROWS)
    for index in (4, 13):
        alone = device_sampler().sample(logits[index : index + 1], [ROWS[index]])
        assert alone == [together[index]]


def test_no_rows_draw_nothing():
    draw = device_sampler().launch(logits_of(0), [])
    assert draw.result() == [] and draw.token_ids.shape == (0,)


@pytest.mark.parametrize("top_k", [3, 0])
def test_equal_scores_are_kept_or_dropped_together(top_k):
    """As on the host: everything is drawn, though three or half of it were asked for."""
    logits = torch.zeros(1, VOCAB)
    params = {"top_k": top_k, "top_p": 1.0 if top_k else 0.5}
    rows = [row(choices=tuple(range(24)), **params)]
    (got,) = device_sampler().sample(logits, rows)
    assert got == Sampler(VOCAB, (EOS,)).sample(logits, rows)[0]
    assert len({token.token_id for token in got.tokens}) > 20


@pytest.mark.parametrize("settings", [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.3}])
def test_a_nucleus_holds_the_tokens_that_it_does_on_the_host(settings):
    logits = logits_of(1, torch.float16, seed=4)  # many scores are equal
    rows = [row(temperature=1.5, choices=tuple(range(24)), **settings)]
    (got,) = device_sampler().sample(logits, rows)
    assert got == Sampler(VOCAB, (EOS,)).sample(logits, rows)[0]


class AllowedTokens:
    """A grammar that knows its mask, or is not there yet."""

    def __init__(self, mask: np.ndarray | None) -> None:
        self.mask = mask
        self.outputs: list[list[int]] = []

    def follow(self, cursor: GrammarCursor, output: list[int]) -> bool:
        self.outputs.append(list(output))
        cursor.mask = self.mask
        return self.mask is not None


def test_a_grammars_mask_holds_on_the_device():
    mask = np.zeros(VOCAB, dtype=np.bool_)
    mask[[0, 31, 32, 500, VOCAB - 1]] = True
    grammars = AllowedTokens(mask)
    rows = [row(grammar=GrammarCursor("g"), choices=tuple(range(50)), temperature=9.0), row()]
    got, beside = device_sampler(grammars=grammars).sample(logits_of(2), rows)
    assert {token.token_id for token in got.tokens} == set(mask.nonzero()[0].tolist())
    assert grammars.outputs == [[5, 5, 6]]
    assert beside == device_sampler().sample(logits_of(2)[1:], rows[1:])[0]


class FailedGrammar:
    """A grammar that cannot be compiled."""

    def follow(self, cursor: GrammarCursor, output: list[int]) -> bool:
        raise GrammarError("it cannot be compiled")


def test_a_failed_grammar_has_the_same_code_on_the_device_as_on_the_host():
    failing, logits = [row(grammar=GrammarCursor("g"))], logits_of(1)
    (got,) = device_sampler(grammars=FailedGrammar()).sample(logits, failing)
    assert got.error_code == "grammar_failed" and got.error == "it cannot be compiled"
    assert [got] == Sampler(VOCAB, (EOS,), grammars=FailedGrammar()).sample(logits, failing)


def test_what_cannot_be_drawn_says_why_and_harms_nobody():
    rows = [
        row(),
        row(logit_bias={VOCAB: 1.0}),
        row(temperature=float("nan")),
        row(grammar=GrammarCursor("g")),
        row(),
        row(repetition_penalty=0.0),
        row(temperature=0.0),
        row(logit_bias={4: float("inf")}),
        row(grammar=GrammarCursor("g")),
        row(temperature=0.0, logprobs=2),
    ]
    logits = logits_of(len(rows))
    logits[0, 700], logits[6, 3], logits[9, 999] = float("nan"), float("inf"), float("-inf")
    nothing = AllowedTokens(np.zeros(VOCAB, dtype=np.bool_))
    draw = device_sampler(grammars=nothing).launch(logits, rows)
    errors = [result.error for result in draw.result()]
    assert errors[0] == errors[6] == errors[9] == "its logits are not finite"
    assert (
        errors[1] == "ValueError: logit_bias: token id 1000 is outside the vocabulary of 1000 ids"
    )
    assert errors[2] == "temperature is not a number of at least 0"
    assert errors[3] == "ValueError: no token is left to draw, or an adjustment overflowed"
    assert errors[4] is None
    assert errors[5] == "ValueError: repetition_penalty is not a number above 0"
    assert errors[7] == "ValueError: logit_bias holds a number that is not finite"
    assert draw.token_ids[0] == 0
    waiting = device_sampler(grammars=AllowedTokens(None)).sample(logits[4:5], [rows[3]])
    assert waiting[0].is_deferred
    (without,) = device_sampler().sample(logits[4:5], [rows[3]])
    assert without.error == "the engine has no tokenizer to follow a grammar with"
    with pytest.raises(ValueError, match="expected"):
        device_sampler().sample(logits, rows[:2])


@triton.jit
def _noise_kernel(bits_ptr, noise_ptr, low, high, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    key = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    tl.store(bits_ptr + o, noise.random_bits(key, o.to(tl.uint64)).to(tl.int64, bitcast=True))
    tl.store(noise_ptr + o, noise.exponential_noise(key, o.to(tl.uint64)))


def test_the_noise_has_the_hosts_bits():
    count = 4096
    ids = torch.arange(count)
    for seed in (0, 2**63 + 5):
        key = stream_key(seed, 1, 7)
        bits, drawn = torch.empty(count, dtype=torch.int64), torch.empty(count)
        _noise_kernel[1,](bits, drawn, key & 0xFFFFFFFF, key >> 32, BLOCK=count)
        assert torch.equal(bits, random_bits([key], ids)[0])
        expected = exponential_noise([key], ids)[0]
        torch.testing.assert_close(drawn, expected, rtol=4e-7, atol=0)
