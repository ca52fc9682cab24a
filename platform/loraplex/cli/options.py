"""Options that several commands share, and how they print."""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from loraplex.cli.api_client import KEY_SOURCES, ApiClient, segment

T = TypeVar("T")

_WIDEST = 100_000
_GAP = 2
"""Between two columns."""


def with_api(command: Callable[..., T]) -> Callable[..., T]:
    """Add `--url` and `--api-key`, and hand the command an open `ApiClient` as `api`."""

    @click.option(
        "--url", envvar="LORAPLEX_URL", default="http://127.0.0.1:8000", show_default=True,
        help="The service. Also read from LORAPLEX_URL.",
    )  # fmt: skip
    @click.option(
        "--api-key", envvar="LORAPLEX_API_KEY",
        help="A key of the tenant, or the admin key; needed. Also read from LORAPLEX_API_KEY.",
    )  # fmt: skip
    @functools.wraps(command)
    def wrapped(
        *args: Any, url: str, api_key: str | None, acting_for: str | None = None, **kwargs: Any
    ) -> T:
        if not api_key:
            raise click.UsageError(
                f"no API key: set LORAPLEX_API_KEY, or give --api-key. {KEY_SOURCES}"
            )
        root = url.rstrip("/").removesuffix("/v1")  # what OpenAI's clients are given
        scope = "" if acting_for is None else f"/t/{segment(acting_for)}"
        with ApiClient(root + scope, api_key) as api:
            return command(*args, api=api, **kwargs)

    return wrapped


def with_tenant_api(command: Callable[..., T]) -> Callable[..., T]:
    """As `with_api`, and `--tenant`: with it `api` is the service as that tenant sees it."""
    option = click.option(
        "--tenant", "acting_for", help="Act for this tenant; an admin key needs it."
    )
    return option(with_api(command))


class Moment(click.ParamType[str]):
    """A time with its zone, or a date, which is its first moment in UTC."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the time as RFC 3339 text."""
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            found = None
        if found is not None and found.tzinfo is None and len(value) == len("2026-01-31"):
            found = found.replace(tzinfo=UTC)
        if found is None or found.tzinfo is None:
            self.fail(
                f"{value!r} is neither a date, as 2026-01-31, nor a time with its zone, "
                "as 2026-01-31T00:00:00Z",
                param,
                ctx,
            )
        return found.astimezone(UTC).isoformat().replace("+00:00", "Z")


def to_the_second(moment: str | None) -> str | None:
    """`2026-11-29T21:18:29.465090Z` as `2026-11-29 21:18:29Z`; `--json` has all of it."""
    if moment is None:
        return None
    return f"{datetime.fromisoformat(moment).astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


json_option = click.option("--json", "as_json", is_flag=True, help="Print the reply as JSON.")


def print_json(value: Any) -> None:
    """Print a reply for another program to read."""
    click.echo(json.dumps(value, indent=2))


def fits_terminal(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether `print_table` breaks no line of these; always where there is no terminal."""
    if not sys.stdout.isatty():
        return True
    widths = (max(map(len, cells)) for cells in zip(columns, *rows, strict=True))
    return sum(widths) + _GAP * (len(columns) - 1) <= Console().width


def print_wide_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As `print_table`; what does not fit the terminal stands upright, as many rows beside one
    another as fit.
    """
    if fits_terminal(columns, rows):
        print_table(columns, rows)
        return
    first = 0
    while first < len(rows):
        last = len(rows)
        while True:
            heading, *lines = (list(line) for line in zip(columns, *rows[first:last], strict=True))
            if last == first + 1 or fits_terminal(heading, lines):
                break
            last -= 1
        if first:
            click.echo()
        print_table(heading, lines)
        first = last


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print rows under headings; None shows as a dash. Nothing is cut: ids are to be copied."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row))
    # Another program reads lines; only a terminal has a width.
    Console(width=None if sys.stdout.isatty() else _WIDEST).print(table)
