"""Progress of long work, told stage by stage.

Owns the small protocol that slow functions report to and its terminal implementation on `rich`.
Knows nothing of what is being done: weights, the demo and the command line bring the words.
"""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class ProgressReporter(Protocol):
    """Hears about one stage at a time; a new stage ends the one before it."""

    def start(self, description: str, total: int | None = None) -> None:
        """Begin a stage of `total` units, or of unknown length."""
        ...

    def update(self, completed: int) -> None:
        """Say how many units of the stage are done."""
        ...

    def finish(self) -> None:
        """End the current stage, if there is one."""
        ...


class SilentProgress:
    """Reports nowhere."""

    def start(self, description: str, total: int | None = None) -> None:
        """Ignore the stage."""

    def update(self, completed: int) -> None:
        """Ignore the count."""

    def finish(self) -> None:
        """Ignore the end."""


class StageBars:
    """A bar for each of several stages; those that are finished stay visible. A context manager.

    One long stage of many parts, which also tells in a log how far it is, is `CountedWork`.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.finish()
        self._progress.stop()

    def start(self, description: str, total: int | None = None) -> None:
        """Show a new bar; without a total it pulses."""
        self.finish()
        self._task = self._progress.add_task(description, total=total)

    def update(self, completed: int) -> None:
        """Move the current bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=completed)

    def finish(self) -> None:
        """Fill the current bar."""
        if self._task is None:
            return
        total = self._progress.tasks[self._task].total or 1
        self._progress.update(self._task, total=total, completed=total)
        self._task = None
