"""Tables as CSV, in which no spreadsheet finds a formula."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | float | int | None
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet would compute."""


@dataclass(frozen=True, slots=True)
class Table:
    """Names of columns, and rows."""

    heading: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def to_csv(table: Table) -> str:
    """With a heading; no cell is a formula to a spreadsheet, whatever its text."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.heading)
    for row in table.rows:
        writer.writerow([_text(cell) for cell in row])
    return text.getvalue()


def _text(cell: Cell) -> str:
    text = "" if cell is None else str(cell)
    return f"'{text}" if text.startswith(FORMULA) else text
