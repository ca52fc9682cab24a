"""The demo's tables in a terminal of 80 columns: nothing is cut, and every wait has its cause."""

import io
import re
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from engine.scheduling.wait_causes import WaitCause
from loraplex.demo.ask import Answer, Asker
from loraplex.demo.board import Board, Column
from loraplex.demo.queueing import CAUSE_WORDS, Wait
from loraplex.demo.summary import print_summary
from loraplex.demo_examples import DemoAdapter, find_examples, load_adapters

ADAPTERS = [
    DemoAdapter(
        name=adapter.name, folder=Path(), description="", max_tokens=9,
        holds=lambda text, name=adapter.name: text == f"as {name}",
    )
    for adapter in load_adapters(find_examples())
]  # fmt: skip
COLUMNS = [
    Column(Asker("smollm2-135m-instruct", "acme", "key"), None),
    *(Column(Asker(adapter.name, "globex", "key"), adapter) for adapter in ADAPTERS),
]


def answer(column: Column, text: str | None = None, **changes: object) -> Answer:
    said = text or ("plain" if column.adapter is None else f"as {column.adapter.name}")
    found = Answer(
        column.asker.model, "Where is my parcel?", text=said, num_tokens=96, ttft_seconds=12.34,
        decode_seconds=9.5, queue={"budget": 11_100.0, "turn": 900.0}, done=True,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def screen(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_names_and_causes_are_whole(width: int) -> None:
    console = screen(width)
    answers = [[answer(column) for column in COLUMNS] for _ in range(5)]
    with Board(console, COLUMNS, answers) as board:
        board.changed()
    board_text, summary = text_of(console), screen(width)
    assert print_summary(summary, COLUMNS, answers)
    for text in (board_text, text_of(summary)):
        for name in ("base model", *(adapter.name for adapter in ADAPTERS), "globex"):
            assert name in text
        assert "…" not in text
        assert max(len(line) for line in text.splitlines()) <= width
    assert board_text.count("budget") == 5 * len(COLUMNS)
    row = next(line for line in text_of(summary).splitlines() if "intents" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "intents", "globex", "10.0", "12.34 s", "12.0 s, budget", "✓ 5 of 5",
    ]  # fmt: skip
    assert "budget: it waited for a seat" in text_of(summary)
    assert "turn: " not in text_of(summary)
    assert "All together: 1,920 tokens in 21.8 s, 88 tok/s." in text_of(summary)


def test_the_base_is_well_when_it_answers_as_no_adapter_does() -> None:
    console = screen()
    assert print_summary(console, COLUMNS, [[answer(column) for column in COLUMNS]] * 5)
    assert "✓ no adapter" in text_of(console)
    tainted = [
        [answer(COLUMNS[0], f"as {ADAPTERS[0].name}"), *map(answer, COLUMNS[1:])] for _ in range(5)
    ]
    console = screen(120)
    assert not print_summary(console, COLUMNS, tainted)
    assert "✗ 5 as an adapter's" in text_of(console)


def test_an_answer_that_failed_or_is_not_as_trained_fails_the_demo() -> None:
    whole = [[answer(column) for column in COLUMNS] for _ in range(5)]
    for number, change, words in (
        (1, {"error": "queue_full"}, "✗ 4 of 5, 1 failed"),
        (0, {"error": "queue_full"}, "✗ no adapter, 1 failed"),
    ):
        console = screen(120)
        broken = [[answer(COLUMNS[n], **(change if n == number else {})) for n in range(4)]]
        assert not print_summary(console, COLUMNS, broken + whole[1:])
        assert words in text_of(console)
    console = screen()
    others = [[whole[0][0], answer(COLUMNS[1], "else"), *whole[0][2:]]] * 2
    assert not print_summary(console, COLUMNS, others + whole[2:])
    assert "✗ 3 of 5" in text_of(console)


def test_every_cause_of_the_engine_has_its_words() -> None:
    assert set(CAUSE_WORDS) == set(get_args(WaitCause))


def test_a_wait_is_told_with_what_most_of_it_was_for() -> None:
    assert Wait.of([{"load": 3.0, "slot": 4.0}]).words == "7 ms, slot"
    assert Wait.of([{"load": 9.0}, {"slot": 4.0}, {"slot": 4.0}]).words == "4 ms, load"
    assert Wait.of([{}, {}]) == Wait(0.0, None) and Wait.of([{"turn": 0.3}]).words == "0 ms"


def test_a_question_has_its_number_also_while_it_is_live() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    answers = [
        [answer(column, question=question) for column in COLUMNS] for question in ("What?", "Why?")
    ]
    with Board(console, COLUMNS, answers) as board:
        board.changed()
    assert set(re.findall(r"\d\. W\w+", text_of(console))) == {"1. What", "2. Why"}
