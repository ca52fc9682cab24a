"""What a report shows, as data: plots with their tables, in sections."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Point:
    """A value, and how much single runs differ (a standard deviation; 0 for none)."""

    x: float
    y: float
    deviation: float = 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """A line of points from left to right."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlot:
    """Lines over a common axis. `marks` are values of x to point out, with a word for each."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPlot:
    """Horizontal bars, each stacked of `parts`; `bars` are a label and a value for each part."""

    x_label: str
    parts: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells as they are printed; all columns but the first line up on the right, words do not."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_prose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something to know, how bad it is, where it was seen, and what to do about it."""

    title: str
    level: Literal["warning", "critical"]
    source: str
    text: str
    advice: str
    figures: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, what to see, and the same in numbers."""

    title: str
    text: str = ""
    plot: LinePlot | BarPlot | None = None
    table: TextTable | None = None
    notes: Sequence[Note] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page."""

    title: str
    lead: str
    """One sentence: what this is, and of what."""
    facts: Sequence[tuple[str, str]] = ()
    """The most important numbers: a label, and a value with its unit."""
    sections: Sequence[Section] = field(default_factory=tuple[Section, ...])
    settings: Sequence[tuple[str, str]] = ()
    """What it was made with."""


def number(value: float) -> str:
    """Whole numbers whole, others with two digits."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"


def line_table(plot: LinePlot, digits: int | None = None) -> TextTable:
    """A plot's numbers: a row for each x, a column for each series. Shares get three digits."""
    points = [point for series in plot.series for point in series.points]
    if digits is None:
        digits = 3 if all(abs(point.y) <= 1 for point in points) else 1
    xs = sorted({point.x for point in points})
    found = [{point.x: point for point in series.points} for series in plot.series]

    def cell(point: Point | None) -> str:
        if point is None:
            return "-"
        spread = f" ± {point.deviation:,.{digits}f}" if point.deviation else ""
        return f"{point.y:,.{digits}f}{spread}"

    rows = [[number(x), *(cell(points.get(x)) for points in found)] for x in xs]
    return TextTable([plot.x_label, *(series.name for series in plot.series)], rows)
