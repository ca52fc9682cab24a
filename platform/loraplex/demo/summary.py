"""The demo's last table: each model's figures, and whether its answers are as they should be."""

from collections.abc import Iterable, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraplex.demo.ask import Answer
from loraplex.demo.board import Column
from loraplex.demo.queueing import CAUSE_WORDS, Wait

MIN_HELD = 4
"""Of five questions: each adapter's predicate must hold on at least this many."""


def print_summary(
    console: Console, columns: Sequence[Column], answers: Sequence[Sequence[Answer]]
) -> bool:
    """Print the table; returns whether all answers came and look as they should.

    An adapter's: as trained. The base model's: as no adapter's.
    """
    table = Table(title="Summary", title_justify="left", title_style="bold")
    longest_name = max(len(column.name) for column in columns)
    table.add_column("model", min_width=longest_name, overflow="fold")
    table.add_column("tenant", overflow="fold")
    for heading in ("tok/s", "first\ntoken", "queued for", "as trained"):
        table.add_column(heading, justify="right", overflow="fold")
    passed = True
    causes: set[str | None] = set()
    for number, column in enumerate(columns):
        own = [row[number] for row in answers]
        came = [answer for answer in own if answer.error is None and answer.text]
        queues = [answer.queue for answer in came if answer.queue is not None]
        wait = Wait.of(queues) if queues else None
        verdict, is_good = _verdict(column, columns, own, came)
        passed &= is_good
        causes |= {wait and wait.cause, *(Wait.of([queue]).cause for queue in queues)}
        table.add_row(
            column.name, column.asker.tenant,
            _middle([answer.tokens_per_second for answer in came], "{:.1f}"),
            _middle([answer.ttft_seconds for answer in came], "{:.2f} s"),
            wait.words if wait else "-",
            Text(f"{'✓' if is_good else '✗'} {verdict}", style="green" if is_good else "red"),
        )  # fmt: skip
    console.print(table)
    if together := _together([answer for row in answers for answer in row]):
        console.print(together, highlight=False)
    console.print(_legend(causes), style="dim", highlight=False)
    return passed


def _together(answers: Iterable[Answer]) -> str | None:
    """What all answers, which were asked for at once, are as one; None where none came."""
    came = [a for a in answers if a.error is None and a.ttft_seconds is not None]
    seconds = max(((a.ttft_seconds or 0.0) + a.decode_seconds for a in came), default=0.0)
    if not seconds:
        return None
    tokens = sum(answer.num_tokens for answer in came)
    return f"All together: {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tok/s."


def _verdict(
    column: Column, columns: Sequence[Column], own: Sequence[Answer], came: Sequence[Answer]
) -> tuple[str, bool]:
    if column.adapter is None:
        adapters = [other.adapter for other in columns if other.adapter is not None]
        num_held = max(sum(a.holds(answer.text) for answer in came) for a in adapters)
        is_good = num_held < MIN_HELD
        words = "no adapter" if is_good else f"{num_held} as an adapter's"
    else:
        num_held = sum(column.adapter.holds(answer.text) for answer in came)
        is_good = num_held >= MIN_HELD
        words = f"{num_held} of {len(own)}"
    num_failed = len(own) - len(came)
    return (f"{words}, {num_failed} failed", False) if num_failed else (words, is_good)


def _legend(causes: Iterable[str | None]) -> str:
    """What the figures are of, and what the causes mean that were told."""
    found = set(causes)
    waits = [
        f"{cause}: it waited {words}." for cause, words in CAUSE_WORDS.items() if cause in found
    ]
    return "\n".join(
        ("The table has medians of a model's answers, each among all the others.", *waits)
    )


def _middle(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(median(known)) if known else "-"
