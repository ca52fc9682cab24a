import itertools
import random
from dataclasses import dataclass

import pytest

from engine.text.stop_strings import StopStrings
from engine.text.text_stream import TextDelta, TextStream
from engine.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import write_byte_level_folder, write_metaspace_folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return [
        Tokenizer.from_pretrained(write_byte_level_folder(folder / "byte_level")),
        Tokenizer.from_pretrained(write_metaspace_folder(folder / "metaspace")),
    ]


class Letters:
    """A detokenizer whose tokens are given texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.num_held = 0

    def push(self, token_id: int) -> str:
        return self.texts[token_id]

    def flush(self) -> str:
        return ""


@dataclass
class Outcome:
    deltas: list[TextDelta]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def num_tokens(self) -> int:
        return sum(delta.num_tokens for delta in self.deltas)

    @property
    def stopped_by(self) -> str | None:
        return self.deltas[-1].stopped_by


def stream(texts: list[str], stop: list[str], size: int = 1, **options) -> Outcome:
    """Push tokens with these texts, `size` at a time, until the end or a stop."""
    text_stream = TextStream(Letters(texts), stop, **options)
    deltas = []
    for start in range(0, max(1, len(texts)), size):
        ids = list(range(start, min(start + size, len(texts))))
        deltas.append(text_stream.push(ids, finished=start + size >= len(texts)))
        if deltas[-1].stopped_by is not None:
            break
    return Outcome(deltas)


def test_without_stop_strings_every_token_is_out_at_once():
    outcome = stream(["He", "llo", "", " you"], [])
    assert [(d.text, d.num_tokens) for d in outcome.deltas] == [
        ("He", 1),
        ("llo", 1),
        ("", 1),
        (" you", 1),
    ]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5])
def test_a_stop_string_over_several_tokens_never_leaks_a_prefix(num_tokens):
    stop = "ABCDE"
    cuts = [0, *range(1, num_tokens), len(stop)]
    texts = ["one ", *(stop[a:b] for a, b in itertools.pairwise(cuts)), "after"]
    outcome = stream(texts, [stop])
    assert [d.text for d in outcome.deltas] == ["one ", *[""] * num_tokens]
    assert outcome.stopped_by == stop
    assert outcome.num_tokens == 1 + num_tokens


def test_a_prefix_that_fails_is_released_whole():
    outcome = stream(["x", "AB", "C", "y", "AB"], ["ABCD"])
    assert [d.text for d in outcome.deltas] == ["x", "", "", "ABCy", "AB"]
    assert [d.num_tokens for d in outcome.deltas] == [1, 0, 0, 3, 1]
    assert outcome.stopped_by is None


def test_a_prefix_that_fails_inside_another_prefix_is_released_up_to_that_one():
    outcome = stream(["aa", "a", "b", "!"], ["aab"])
    assert [d.text for d in outcome.deltas] == ["", "a", ""]
    assert outcome.num_tokens == 3


def test_stop_at_the_first_token():
    outcome = stream(["STOP", "more"], ["STOP"])
    assert outcome.deltas == [TextDelta("", 1, "STOP")]


def test_text_before_a_stop_string_in_the_same_token_is_kept():
    assert stream(["one END two"], ["END"]).deltas == [TextDelta("one ", 1, "END")]


def test_of_two_stops_the_shorter_one_completes_first():
    for stops in (["END", "END OF"], ["END OF", "END"]):
        for size in (1, 2, 3):
            outcome = stream(["a ", "END", " OF"], stops, size)
            assert (outcome.text, outcome.num_tokens, outcome.stopped_by) == ("a ", 2, "END")


def test_the_match_that_begins_first_wins_if_it_completes():
    stops = ["bc", "abcd"]
    for size in (1, 2, 3, 4, 5):
        longer = stream(["x", "a", "bc", "d", "e"], stops, size)
        assert (longer.text, longer.num_tokens, longer.stopped_by) == ("x", 4, "abcd")
        inner = stream(["x", "a", "bc", "e", "f"], stops, size)
        assert (inner.text, inner.num_tokens, inner.stopped_by) == ("xa", 3, "bc")
        ended = stream(["x", "a", "bc"], stops, size)
        assert (ended.text, ended.num_tokens, ended.stopped_by) == ("xa", 3, "bc")


def test_the_stop_string_can_be_shown():
    outcome = stream(["one E", "ND two"], ["END"], include_stop_in_output=True)
    assert outcome.text == "one END"
    assert outcome.num_tokens == 2


def test_stop_strings_do_not_count_within_min_tokens():
    texts = ["a", "END", "b", "E", "ND", "c"]
    for size in range(1, 7):
        outcome = stream(texts, ["END"], size, min_tokens=2)
        assert (outcome.text, outcome.num_tokens, outcome.stopped_by) == ("aENDb", 5, "END")
        # One that the token after completes does count.
        outcome = stream(texts, ["END"], size, min_tokens=4)
        assert (outcome.text, outcome.num_tokens) == ("aENDb", 5)
        outcome = stream(texts, ["END"], size, min_tokens=5)
        assert (outcome.text, outcome.num_tokens) == ("".join(texts), 6)


def test_the_token_that_ends_a_choice_counts_but_does_not_show():
    text_stream = TextStream(Letters(["a", "<stop>"]), ["<stop>", "zz"])
    assert text_stream.push([0], False) == TextDelta("a", 1)
    assert text_stream.push([1], True, stop_token_id=1) == TextDelta("", 1)

    shown = TextStream(Letters(["a", "<stop>"]), [], include_stop_in_output=True)
    assert shown.push([0, 1], True, stop_token_id=1) == TextDelta("a<stop>", 2)


def test_a_held_prefix_is_released_when_a_stop_token_ends_the_choice():
    text_stream = TextStream(Letters(["EN", "<stop>"]), ["END"])
    assert text_stream.push([0], False) == TextDelta("", 0)
    assert text_stream.push([1], True, stop_token_id=1) == TextDelta("EN", 2)


def test_a_stop_token_in_the_wrong_place_is_refused():
    text_stream = TextStream(Letters(["a", "b"]), [])
    for ids, finished in (([0], False), ([1, 0], True), ([], True)):
        with pytest.raises(ValueError, match="stop_token_id"):
            text_stream.push(ids, finished, stop_token_id=1)


def test_pushes_after_the_end_are_empty():
    text_stream = TextStream(Letters(["END", "x"]), ["END"])
    assert text_stream.push([0], False) == TextDelta("", 1, "END")
    assert text_stream.push([1], True) == TextDelta("", 0, "END")
    text_stream = TextStream(Letters(["x"]), [])
    assert text_stream.push([], True) == TextDelta("", 0)
    assert text_stream.push([0], True) == TextDelta("", 0)


def test_any_grouping_of_tokens_gives_the_text_of_a_search_through_all():
    rng = random.Random(0)
    num_stopped = 0
    for _ in range(3000):
        texts = ["".join(rng.choices("ab", k=rng.randint(0, 3))) for _ in range(rng.randint(0, 8))]
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        min_tokens = rng.choice((0, 0, 1, 3))
        include = rng.random() < 0.5

        full = "".join(texts)
        ends_after = len("".join(texts[:min_tokens]))
        match = StopStrings(stop).find(full, ends_after)
        text, num_tokens = full, len(texts)
        if match is not None:
            num_stopped += 1
            text = full[: match.end if include else match.start]
            num_tokens = next(
                n for n in range(len(texts) + 1) if len("".join(texts[:n])) >= match.end
            )
        outcome = stream(
            texts, stop, rng.randint(1, 4), include_stop_in_output=include, min_tokens=min_tokens
        )
        assert (outcome.text, outcome.num_tokens) == (text, num_tokens)
        assert outcome.stopped_by == (match.stop if match else None)
    assert num_stopped > 500


@pytest.mark.parametrize("family", [0, 1])
def test_real_tokens_in_any_grouping_equal_one_push(tokenizers, family):
    tokenizer = tokenizers[family]
    rng = random.Random(family)
    prompt = tokenizer.encode("Hello")
    pool = tokenizer.encode("the 🎉 fox é\n END 한 of 👨‍👩‍👧 line", add_special_tokens=False)
    num_stopped = 0
    for _ in range(600):
        ids = rng.choices([*pool, 0, 1, 2, tokenizer.vocab_size + 1], k=rng.randint(0, 20))
        whole = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
        start = rng.randrange(len(whole)) if whole else 0
        stop = [whole[start : start + rng.randint(1, 5)] or "x", "line", "🎉 fox"]
        match = StopStrings(stop).find(whole)
        expected = whole[: match.start] if match else whole

        counts = set()
        for size in (1, 2, 3, 7, 20):
            text_stream = TextStream(tokenizer.new_detokenizer(prompt), stop)
            text, num_tokens, stopped_by = "", 0, None
            for begin in range(0, max(1, len(ids)), size):
                delta = text_stream.push(ids[begin : begin + size], begin + size >= len(ids))
                text += delta.text
                num_tokens += delta.num_tokens
                stopped_by = delta.stopped_by
                assert expected.startswith(text)
            assert text == expected
            assert stopped_by == (match.stop if match else None)
            counts.add(num_tokens)
        assert len(counts) == 1
        if match is None:
            assert counts == {len(ids)}
        num_stopped += match is not None
    assert num_stopped > 100
