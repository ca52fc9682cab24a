"""Long work says at once what it does, and how far it is, also where nobody redraws lines."""

import io

from rich.console import Console

from loraplex.cli.counted_work import CountedWork


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_the_work_is_named_at_once_and_lines_come_now_and_then() -> None:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, width=30)
    with CountedWork(
        "Simulating 2,000 runs [of all] ...", 2000, console=console, line_seconds=10, clock=clock
    ) as work:
        assert output.getvalue() == "Simulating 2,000 runs [of all] ...\n"
        for done in range(1, 41):
            clock.now += 1
            work.update(done, "last fcfs")
    assert output.getvalue().splitlines()[1:] == [
        f"  {done} of 2,000 after {done} s, last fcfs" for done in (10, 20, 30, 40)
    ]


def test_where_nobody_knows_how_much_there_is_only_what_is_done_is_told() -> None:
    output, clock = io.StringIO(), Clock()
    with CountedWork("Planning ...", console=Console(file=output), clock=clock) as work:
        clock.now += 60
        work.update(3)
    assert output.getvalue() == "Planning ...\n  3 after 60 s\n"


def test_in_a_terminal_a_bar_shows_what_goes_on_and_goes_with_the_work() -> None:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=True, width=100)
    with CountedWork("Simulating ...", 4, console=console, clock=clock) as work:
        clock.now += 60
        work.update(3, "last fcfs")
    text = output.getvalue()
    assert text.startswith("Simulating ...\n") and "3/4" in text and "after 60 s" not in text
