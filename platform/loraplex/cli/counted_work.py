"""Long work in many parts, as its user sees it: a bar in a terminal, elsewhere lines."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINE_SECONDS = 10.0


class CountedWork:
    """A context manager that says on standard error what is being done, at once and to stay.

    In a terminal a bar follows, which goes with the work. Where nobody redraws lines (a file, a
    pipe, CI) how far it is gets a line, every `line_seconds` at most. For work in several stages
    there is `StageBars`.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        console: Console | None = None,
        line_seconds: float = _LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total`: how many parts there are; None where nobody knows."""
        self._what = what
        self._total = total
        self._console = console or Console(stderr=True)
        self._line_seconds = line_seconds
        self._clock = clock
        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), console=self._console, transient=True,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, state="")
        self._began = self._said = clock()
        self.done = 0
        """How many parts are."""

    def __enter__(self) -> Self:
        self._say(self._what)
        self._began = self._said = self._clock()
        self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, done: int, state: str = "") -> None:
        """So many parts are done, and this is what goes on."""
        self.done = done
        self._bar.update(self._task, completed=done, state=state)
        now = self._clock()
        if self._console.is_terminal or now - self._said < self._line_seconds:
            return
        self._said = now
        count = f"{done:,}" if self._total is None else f"{done:,} of {self._total:,}"
        words = (f"{count} after {now - self._began:.0f} s", state)
        self._say("  " + ", ".join(word for word in words if word))

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
