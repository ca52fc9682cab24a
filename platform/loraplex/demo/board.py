"""The demo's screen: one table a question, a column a model; the one in progress is live."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loraplex.demo.ask import Answer, Asker
from loraplex.demo.queueing import Wait
from loraplex.demo_examples import DemoAdapter


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the board: who is asked, and what its answers should show."""

    asker: Asker
    adapter: DemoAdapter | None
    """None for the base model, whose answers should show no adapter's effect."""

    @property
    def name(self) -> str:
        """Of the model."""
        return "base model" if self.adapter is None else self.adapter.name

    @property
    def heading(self) -> str:
        """Two lines: the model, and whose it is or who asks it."""
        return f"{self.name}\n{'for' if self.adapter is None else 'of'} {self.asker.tenant}"

    def mark(self, text: str) -> Text:
        """What an answer is worth."""
        if self.adapter is None:
            return Text("no adapter", style="dim")
        if self.adapter.holds(text):
            return Text("✓ as trained", style="green")
        return Text("✗ not as trained", "red")


class Board:
    """A context manager; call `changed` whenever an answer grew.

    Finished questions are printed above, in order, and stay; the first unfinished one is redrawn
    in place. Without a terminal only finished questions are printed.
    """

    def __init__(
        self, console: Console, columns: Sequence[Column], answers: Sequence[Sequence[Answer]]
    ) -> None:
        self._console = console
        self._columns = columns
        self._answers = answers
        self._num_printed = 0
        self._live = Live(
            console=console, refresh_per_second=8, transient=True, get_renderable=self._current,
            vertical_overflow="crop",
        )  # fmt: skip

    def __enter__(self) -> "Board":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def changed(self) -> None:
        """Print the questions that are now complete."""
        while self._num_printed < len(self._answers) and all(
            answer.done for answer in self._answers[self._num_printed]
        ):
            table = self._question_table(self._num_printed)
            self._num_printed += 1
            self._console.print(table)
            self._console.print()

    def _current(self) -> RenderableType:
        if self._num_printed == len(self._answers):
            return Text("")
        return self._question_table(self._num_printed)

    def _question_table(self, index: int) -> Table:
        row = self._answers[index]
        table = Table(
            title=f"{index + 1}. {row[0].question}", title_justify="left", title_style="bold",
            expand=True, show_lines=False, show_edge=False, pad_edge=False,
        )  # fmt: skip
        for column in self._columns:
            table.add_column(column.heading, ratio=1, overflow="fold", vertical="top")
        table.add_row(*(_cell(answer) for answer in row))
        table.add_row(*(_stats(*cell) for cell in zip(row, self._columns, strict=True)))
        return table


def _cell(answer: Answer) -> Text:
    if answer.error:
        return Text(answer.error, style="red")
    return Text(answer.text.strip() + ("" if answer.done else " ▌"))


def _stats(answer: Answer, column: Column) -> Text:
    if not answer.done or answer.error:
        return Text("")
    rate, ttft, queue = answer.tokens_per_second, answer.ttft_seconds, answer.queue
    parts = [
        f"{answer.num_tokens} tokens",
        f"{rate:.1f} tok/s" if rate is not None else None,
        f"first {ttft:.2f} s" if ttft is not None else None,
        f"queued {Wait.of([queue]).words}" if queue is not None else None,
    ]
    text = Text("\n" + "\n".join(part for part in parts if part), style="dim")
    return text.append("\n").append_text(column.mark(answer.text))
