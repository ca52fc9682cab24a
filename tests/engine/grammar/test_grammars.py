"""Structured output in the engine: rows with a grammar among rows without, on real tokenizers."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import llguidance
import pytest
import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.errors import RequestRefused
from engine.grammar.cursor import GrammarCursor
from engine.grammar.grammars import GrammarError, Grammars
from engine.messages import EngineRequest
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow
from engine.text.tokenizer import Tokenizer
from tests.support.memory_engine import FakeClock
from tests.support.random_runner import RandomRunner
from tests.support.tiny_tokenizers import write_byte_level_folder, write_metaspace_folder

VOCAB = 410  # beyond the tokenizers' 400: ids without a token are never drawn
SCHEMA = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["refund", "café"]},
        "order": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["intent", "order", "tags"],
    "additionalProperties": False,
}
FAMILIES = [(write_byte_level_folder, 2), (write_metaspace_folder, 2)]


def grammar_of(schema: object, **options: object) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides=options or None
    )


COMPACT = grammar_of(SCHEMA, whitespace_flexible=False)


def ready(grammars: Grammars, *texts: str) -> None:
    for text in texts:
        grammars.prepare(text)
        grammars._future(text).result(10)


@pytest.fixture(params=FAMILIES, ids=["byte_level", "metaspace"])
def family(request, tmp_path) -> tuple[Grammars, Tokenizer, int]:
    write, eos = request.param
    folder = write(tmp_path)
    grammars = Grammars.from_pretrained(folder, vocab_size=VOCAB, eos_token_ids=[eos])
    assert grammars is not None
    return grammars, Tokenizer.from_pretrained(folder), eos


def new_row(grammar: str | None, seed: int, **params) -> SamplingRow:
    sampling = SamplingParams(max_tokens=400, seed=seed, grammar=grammar, **params)
    return SamplingRow(
        sampling, (0,), [5, 6, 7], 3, None if grammar is None else GrammarCursor(grammar)
    )


def say(sampler: Sampler, row: SamplingRow, eos: int, limit: int = 400) -> list[int]:
    """Draw from random logits until EOS."""
    tokens = row.token_ids
    assert isinstance(tokens, list)
    for step in range(limit):
        generator = torch.Generator().manual_seed(1000 * row.params.seed + step)
        logits = torch.randn(1, VOCAB, generator=generator)
        (drawn,) = sampler.sample(logits, [row])
        assert drawn.error is None, drawn.error
        tokens.append(drawn.tokens[0].token_id)
        if tokens[-1] == eos:
            return tokens[row.num_prompt_tokens :]
    raise AssertionError("no end")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whatever_the_model_wants_to_say_it_says_it_within_the_schema(family, temperature):
    grammars, tokenizer, eos = family
    ready(grammars, COMPACT)
    sampler = Sampler(VOCAB, [eos], grammars=grammars)
    said = set()
    for seed in range(12):
        output = say(sampler, new_row(COMPACT, seed, temperature=temperature), eos)
        value = json.loads(tokenizer.decode(output[:-1]))
        assert list(value) == ["intent", "order", "tags"]
        assert value["intent"] in ("refund", "café")
        assert 0 <= value["order"] <= 999
        assert len(value["tags"]) <= 2 and all(len(tag) <= 4 for tag in value["tags"])
        said.add(json.dumps(value))
    assert len(said) > 6


def test_eos_is_allowed_where_the_text_may_end_and_nowhere_else(family):
    grammars, tokenizer, eos = family
    number = grammar_of({"type": "integer"})
    ready(grammars, number)
    cursor = GrammarCursor(number)
    assert grammars.follow(cursor, [])
    assert cursor.mask is not None and not cursor.mask[eos]
    digit = next(id for id in range(400) if tokenizer.token_bytes(id) == b"4")
    assert cursor.mask[digit]
    assert grammars.follow(cursor, [digit, digit]) and cursor.mask[eos]
    assert cursor.mask.shape == (VOCAB,)
    assert not cursor.mask[tokenizer.vocab_size :].any()


def test_a_row_with_a_grammar_changes_no_bit_of_its_neighbours(family):
    grammars, _, eos = family
    ready(grammars, COMPACT)
    sampler = Sampler(VOCAB, [eos], grammars=grammars)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    plain = [
        new_row(None, seed, temperature=t, logprobs=k, logit_bias=b)
        for seed, t, k, b in [(1, 0.0, None, {}), (2, 1.0, None, {}), (3, 1.0, 3, {7: 2.0})]
    ]
    constrained = [new_row(COMPACT, seed, temperature=1.0, logprobs=2) for seed in (4, 5, 6)]
    before = logits.clone()
    alone = sampler.sample(logits[:3], plain)
    mixed = sampler.sample(logits[[0, 3, 1, 4, 2, 5]], [
        row for pair in zip(plain, constrained, strict=True) for row in pair
    ])  # fmt: skip
    assert mixed[::2] == alone
    assert torch.equal(logits, before)
    raw = torch.log_softmax(before, dim=-1)
    for place, row in zip((3, 4, 5), mixed[1::2], strict=True):
        token = row.tokens[0]
        # Log-probabilities are the model's own, whatever the grammar forbade.
        assert token.logprob == pytest.approx(float(raw[place, token.token_id]), abs=1e-6)
        assert token.top[0][0] == int(raw[place].argmax())


def test_a_row_waits_for_its_grammar_and_the_others_do_not(family):
    grammars, _, eos = family
    sampler = Sampler(VOCAB, [eos], grammars=grammars)
    fresh = grammar_of({"enum": [f"number {i}" for i in range(500)]})
    rows = [new_row(fresh, 1), new_row(None, 2)]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    gate = threading.Event()
    grammars._thread.submit(gate.wait, 10)
    first = sampler.sample(logits, rows)
    assert first[0].is_deferred and not first[0].tokens and first[1].tokens
    gate.set()
    ready(grammars, fresh)
    second = sampler.sample(logits, rows)
    assert second[0].tokens and second[1] == first[1]


def test_tenants_take_turns_where_many_grammars_wait(family):
    grammars, _, _ = family
    texts = [grammar_of({"const": f"text {i}"}) for i in range(6)]
    shared, wanted = texts[4:]
    order: list[str] = []
    compile_one = grammars._compile
    grammars._compile = lambda text: (order.append(text), compile_one(text))[1]
    gate = threading.Event()
    grammars._thread.submit(gate.wait, 10)
    for text in (*texts[:4], shared):
        grammars.prepare(text, "hog")
    cursor = GrammarCursor(wanted, "acme")
    assert not grammars.follow(cursor, []) and not grammars.follow(cursor, [])
    grammars.prepare(shared, "acme")
    gate.set()
    ready(grammars, *texts)
    assert order == [texts[0], wanted, texts[1], shared, texts[2], texts[3]]
    assert grammars.follow(cursor, [])


def test_a_grammar_that_cannot_be_compiled_fails_its_own_row_only(family):
    grammars, _, eos = family
    broken = grammar_of({"type": "object", "not": {}})
    grammars.prepare(broken)
    with pytest.raises(GrammarError):
        grammars._future(broken).result(10)
    sampler = Sampler(VOCAB, [eos], grammars=grammars)
    rows = [new_row(broken, 1), new_row(None, 2)]
    failed, good = sampler.sample(torch.zeros(2, VOCAB), rows)
    assert failed.error is not None and "not" in failed.error
    assert good.error is None and good.tokens


def test_a_row_that_fails_begins_once_more_and_leaves_others_a_new_grammar(family):
    """Copies share their lexer's limits: what one tenant drew must not fail another's rows."""
    grammars, tokenizer, _ = family
    ready(grammars, COMPACT)
    spoilt = grammars._future(COMPACT)
    wrong = tokenizer.encode("the", add_special_tokens=False)
    cursor, other = GrammarCursor(COMPACT), GrammarCursor(COMPACT)
    assert grammars.follow(other, [])
    assert not grammars.follow(cursor, wrong)  # compiled anew
    assert grammars._future(COMPACT) is not spoilt
    ready(grammars, COMPACT)
    with pytest.raises(GrammarError, match="left its grammar"):
        grammars.follow(cursor, wrong)
    ready(grammars, COMPACT)
    assert grammars.follow(other, [])
    assert grammars.follow(GrammarCursor(COMPACT), [])


def test_the_cache_is_bounded_and_keeps_what_is_used(family, monkeypatch):
    grammars, _, _ = family
    monkeypatch.setattr("engine.grammar.grammars.CACHE_BYTES", 5 * 4 * 2**20)
    texts = [grammar_of({"const": f"text {i}"}) for i in range(20)]
    for text in texts:
        ready(grammars, texts[0], text)
    assert len(grammars._compiled) <= 5
    assert texts[0] in grammars._compiled and texts[-1] in grammars._compiled


def test_a_model_without_a_fitting_tokenizer_has_no_grammars(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    assert Grammars.from_pretrained(tmp_path / "broken", vocab_size=9, eos_token_ids=[2]) is None
    assert Grammars.from_pretrained(tmp_path, vocab_size=400, eos_token_ids=[2]) is None
    folder = write_byte_level_folder(tmp_path / "small")
    assert Grammars.from_pretrained(folder, vocab_size=300, eos_token_ids=[2]) is None


class NoAdapters:
    def prefetch(self, digest: str) -> None: ...
    def poll(self) -> Sequence[object]:
        return ()

    def hasten(self, digest: str) -> None: ...
    def get(self, digest: str) -> None: ...
    def release(self, digest: str) -> None: ...
    def forget(self, digest: str) -> None: ...


def run_engine(
    grammars: Grammars, eos: int, requests: Sequence[EngineRequest], num_kv_blocks: int
) -> tuple[dict[tuple[int, int], tuple[list[int], str]], int]:
    """(tokens, finish reason) by (request, choice), and how many preemptions there were."""
    config = SchedulerConfig(num_kv_blocks=num_kv_blocks, max_num_seqs=8, max_model_len=160)
    core = EngineCore(
        config, RandomRunner(Sampler(VOCAB, [eos], grammars=grammars), VOCAB), NoAdapters(),
        eos_token_ids=[eos], vocab_size=VOCAB, clock=FakeClock(),
        prepare_grammar=grammars.prepare,
    )  # fmt: skip
    for request in requests:
        core.add("client", request)
    said: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], str] = {}
    for _ in range(20_000):
        if not core.has_work:
            break
        for _, output in core.step():
            assert output.error is None, output.error
            for delta in output.deltas:
                key = (output.request_id, delta.index)
                said.setdefault(key, []).extend(delta.token_ids)
                if delta.finish_reason:
                    reasons[key] = delta.finish_reason
        core.check_integrity()
    return {key: (said[key], reasons[key]) for key in said}, core.stats().preemptions


def test_a_grammar_follows_its_rows_through_forks_and_preemptions(family):
    grammars, tokenizer, eos = family
    requests = [
        EngineRequest(
            request_id=number, tenant="t", prompt_token_ids=[5, 6, 7 + number],
            sampling=SamplingParams(
                max_tokens=limit, seed=number, n=n, temperature=1.0,
                grammar=COMPACT if constrained else None,
            ),
        )
        for number, (n, constrained, limit) in enumerate(
            [(3, True, 150), (1, False, 60), (2, True, 150), (1, True, 5), (1, False, 60)]
        )
    ]  # fmt: skip
    roomy, none = run_engine(grammars, eos, requests, num_kv_blocks=200)
    tight, some = run_engine(grammars, eos, requests, num_kv_blocks=14)
    assert none == 0 and some > 0
    assert roomy == tight
    for number in (0, 2):
        texts = set()
        for choice in range(requests[number].sampling.n):
            output, reason = roomy[number, choice]
            assert (reason, output[-1]) == ("stop", eos)
            text = tokenizer.decode(output[:-1])
            assert json.loads(text)["order"] in range(1000)
            texts.add(text)
        assert len(texts) == requests[number].sampling.n
    assert roomy[3, 0][1] == "length"


def test_without_grammars_the_engine_refuses_before_anything_is_queued(family):
    _, _, eos = family
    core = EngineCore(
        SchedulerConfig(num_kv_blocks=8), RandomRunner(Sampler(VOCAB, [eos]), VOCAB), NoAdapters(),
        eos_token_ids=[eos], vocab_size=VOCAB, clock=FakeClock(),
    )  # fmt: skip
    request = EngineRequest(
        request_id=1, tenant="t", prompt_token_ids=[5],
        sampling=SamplingParams(max_tokens=4, seed=0, grammar=COMPACT),
    )  # fmt: skip
    with pytest.raises(RequestRefused) as refused:
        core.add("client", request)
    assert refused.value.code == "structured_output_unavailable"
    assert not core.has_work and core.stats().waiting == 0


def test_a_model_folder_is_read_with_its_stop_tokens(tmp_path: Path):
    folder = write_byte_level_folder(tmp_path)
    grammars = Grammars.from_pretrained(folder, vocab_size=400, eos_token_ids=[2, 0])
    assert grammars is not None
    text = grammar_of({"const": "a"})
    ready(grammars, text)
    cursor = GrammarCursor(text)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert grammars.follow(cursor, tokenizer.encode('"a"'))
    assert cursor.mask is not None and set(cursor.mask.nonzero()[0].tolist()) == {0, 2}
