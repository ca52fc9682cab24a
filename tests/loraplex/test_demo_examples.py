from pathlib import Path

import pytest

from loraplex.demo_examples import ExamplesError, find_examples, load_adapters, load_questions


def write_adapter(folder: Path, demo: str) -> None:
    target = folder / "adapters" / "one"
    target.mkdir(parents=True)
    (target / "demo.json").write_text(demo)


def test_the_checkouts_own_examples_are_found() -> None:
    folder = find_examples()
    assert (folder / "questions.json").is_file()
    assert len(load_adapters(folder)) == 3


def test_a_folder_without_examples_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ExamplesError, match="--examples DIR"):
        find_examples(tmp_path)


def test_no_adapters_names_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(ExamplesError, match=r"train_adapters\.py"):
        load_adapters(tmp_path)


def test_an_adapter_brings_its_predicate(tmp_path: Path) -> None:
    write_adapter(
        tmp_path, '{"description": "Steps.", "predicate": "three_steps", "max_tokens": 9}'
    )
    (adapter,) = load_adapters(tmp_path)
    assert (adapter.name, adapter.max_tokens) == ("one", 9)
    assert adapter.holds("1. a\n2. b\n3. c")


def test_an_unknown_predicate_is_named(tmp_path: Path) -> None:
    write_adapter(tmp_path, '{"description": "?", "predicate": "dance", "max_tokens": 9}')
    with pytest.raises(ExamplesError, match="'dance'; there are intent_json"):
        load_adapters(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"demo": ["a"]}', '{"demo": [1], "held_out": []}'])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "questions.json").write_text(text)
    with pytest.raises(ExamplesError, match=r"questions\.json"):
        load_questions(tmp_path)
