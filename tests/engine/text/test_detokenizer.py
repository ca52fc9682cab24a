import random

import pytest

from engine.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import write_byte_level_folder, write_metaspace_folder

TEXTS = [
    "plain words, then more",
    "  two leading spaces\n\n and lines ",
    "🎉🎊 party 👍🏽 tone",
    "🇩🇪🇫🇷 flags",
    "👨‍👩‍👧‍👦 family, ❤️‍🔥 heart",
    "e\u0301 a\u0308 combining, naïve é",
    "한국어 안녕하세요",
    "مرحبا بالعالم",
    "漢字とかな",
    "a real \ufffd stays\ufffd",
    "\ufffd",
    "",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": Tokenizer.from_pretrained(write_byte_level_folder(folder / "byte_level")),
        "metaspace": Tokenizer.from_pretrained(write_metaspace_folder(folder / "metaspace")),
    }


@pytest.fixture(params=["byte_level", "metaspace"])
def tokenizer(request, tokenizers) -> Tokenizer:
    return tokenizers[request.param]


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.new_detokenizer(prompt, skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_cut_at_every_token_equals_the_decoding_of_its_tokens(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    for end in range(len(ids) + 1):
        out = pieces(tokenizer, [], ids[:end])
        assert "".join(out) == tokenizer.decode(ids[:end])
        if "\ufffd" not in text:
            # Half a character shows only where the output ends in one.
            assert "\ufffd" not in "".join(out[:-1])


@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_joined_equal_the_decoding_of_all(tokenizer, skip):
    rng = random.Random(0)
    size = tokenizer.vocab_size
    for _ in range(4000):
        # Often bytes and special tokens, sometimes ids that have no token.
        ids = [
            rng.choice((rng.randrange(size), rng.randrange(260), rng.randrange(6), size + 3))
            for _ in range(rng.randint(0, 14))
        ]
        assert "".join(pieces(tokenizer, [], ids, skip)) == tokenizer.decode(ids, skip)


def test_any_output_continues_its_prompt(tokenizer):
    rng = random.Random(1)
    prompt = tokenizer.encode("the prompt, and")
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 10))]
        expected = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
        assert "".join(pieces(tokenizer, prompt, ids)) == expected


def test_leading_space_stays_after_a_text_and_goes_at_its_start(tokenizers):
    tokenizer = tokenizers["metaspace"]
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [], ids)) == "the fox"
    assert "".join(pieces(tokenizer, [1], ids)) == "the fox"
    assert "".join(pieces(tokenizer, tokenizer.encode("Hello"), ids)) == " the fox"


def test_ordinary_text_is_released_token_by_token(tokenizer):
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    out = pieces(tokenizer, [], ids)
    assert all(out[:-1])
    assert out[-1] == ""


def test_held_tokens_are_those_whose_text_is_not_out(tokenizer):
    ids = tokenizer.encode("a🎉b", add_special_tokens=False)
    detokenizer = tokenizer.new_detokenizer([])
    num_out, text = 0, ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        assert detokenizer.num_held <= count
        num_out = count - detokenizer.num_held
        assert text == tokenizer.decode(ids[:num_out])
    assert num_out == len(ids)
    assert text == "a🎉b"


def test_flush_counts_no_token_as_held(tokenizer):
    ids = tokenizer.encode("🎉", add_special_tokens=False)[:-1]
    detokenizer = tokenizer.new_detokenizer([])
    for token_id in ids:
        detokenizer.push(token_id)
    assert detokenizer.num_held > 0
    assert "\ufffd" in detokenizer.flush()
    assert detokenizer.num_held == 0


def test_broken_and_replacement_characters_are_out_with_the_next_token(tokenizer):
    # A byte that no character can contain, and U+FFFD itself: neither is held beyond its need.
    garbage = next(i for i in range(300) if tokenizer.token_bytes(i) == b"\x80")
    replacement = tokenizer.encode("\ufffd", add_special_tokens=False)
    word = tokenizer.encode("the", add_special_tokens=False)[-1]
    detokenizer = tokenizer.new_detokenizer([])
    for _ in range(50):
        for token_id in (garbage, *replacement, word):
            detokenizer.push(token_id)
        assert detokenizer.num_held == 0
