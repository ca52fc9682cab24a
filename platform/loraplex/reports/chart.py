"""Plots as SVG: self-contained, light or dark as its reader prefers, values on hovering."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import get_args

from engine.scheduling.wait_causes import WaitCause
from loraplex.reports.axis import Axis, axis, tick_label
from loraplex.reports.plots import BarPlot, LinePlot, Point, Series

WIDTH, HEIGHT = 680, 340
LEFT, RIGHT, BOTTOM = 66, 18, 46
LEGEND_LINE = 20
BAR_HEIGHT, BAR_LABEL = 22, 150
DASHES = ("", "7 4", "2 3", "10 3 2 3", "", "7 4", "2 3", "10 3 2 3")
NUM_COLOURS = 8
# Okabe and Ito's colours, which the colour-blind can tell apart; lighter ones on dark ground.
STYLE = """
.lx{--ink:#1f2328;--soft:#59636e;--grid:#d8dee4;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b0518a;
--c4:#8a6d00;--c5:#3a8fb7;--c6:#5b5b5b;--c7:#7b4fb5;--quota:#cc79a7;--load:#56b4e9;--slot:#e69f00;
--kv:#d55e00;--budget:#009e73;--turn:#98a0a8;font:12px system-ui,sans-serif}
@media (prefers-color-scheme:dark){.lx{--ink:#e6edf3;--soft:#9198a1;--grid:#30363d;--c0:#58b4e8;
--c1:#ff9d5c;--c2:#3ccfa0;--c3:#e79bc5;--c4:#e6c84c;--c5:#8fd0f0;--c6:#b5b5b5;--c7:#b99af0}}
.lx text{fill:var(--ink)}.lx .soft{fill:var(--soft)}.lx .grid{stroke:var(--grid)}
.lx .axis{stroke:var(--soft)}.lx .line{fill:none;stroke-width:2;stroke-linejoin:round}
.lx .band{opacity:.16;stroke:none}.lx .mark{stroke:var(--soft);stroke-dasharray:3 3}
""".replace("\n", "")


def chart(plot: LinePlot | BarPlot, *, title: str = "") -> str:
    """The plot as one `<svg>` element, to be put into a page or a file of its own."""
    body, height = _lines(plot) if isinstance(plot, LinePlot) else _bars(plot)
    label = escape(title or plot.x_label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lx" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{label}"><title>{label}</title><style>{STYLE}</style>'
        f"{''.join(body)}</svg>"
    )


def _lines(plot: LinePlot) -> tuple[list[str], int]:
    legend, top = _legend([series.name for series in plot.series], dashed=True)
    bottom = top + HEIGHT - BOTTOM
    points = [point for series in plot.series for point in series.points]
    x = axis(
        [point.x for point in points] + [at for at, _ in plot.marks],
        LEFT, WIDTH - RIGHT, scale=plot.x_scale, from_zero=False,
    )  # fmt: skip
    y = axis(
        [value for p in points for value in (p.y, p.y + p.deviation)],
        bottom, top, scale=plot.y_scale,
    )  # fmt: skip
    body = [*legend, *_frame(x, y, plot.x_label, plot.y_label)]
    for at, word in plot.marks:
        body.append(
            f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top}" y2="{bottom}"/>'
        )
        is_right = x(at) > (LEFT + WIDTH) / 2
        body.append(
            _text(
                x(at) + (-5 if is_right else 5),
                top + 12,
                word,
                "soft",
                "end" if is_right else "start",
            )
        )
    for number, series in enumerate(plot.series):
        body += _series(series, number, x, y, plot)
    return body, bottom + BOTTOM


def _series(series: Series, number: int, x: Axis, y: Axis, plot: LinePlot) -> Iterable[str]:
    colour, dash = f"var(--c{number % NUM_COLOURS})", DASHES[number % len(DASHES)]
    shown = [p for p in series.points if y.scale == "linear" or p.y > 0]
    if not shown:
        return
    if any(p.deviation for p in shown):
        upper = [f"{x(p.x):.1f},{y(p.y + p.deviation):.1f}" for p in shown]
        lower = [f"{x(p.x):.1f},{y(p.y - p.deviation):.1f}" for p in reversed(shown)]
        yield f'<polygon class="band" fill="{colour}" points="{" ".join(upper + lower)}"/>'
    line = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in shown)
    yield (f'<polyline class="line" stroke="{colour}" stroke-dasharray="{dash}" points="{line}"/>')
    if len(shown) > 60:  # a curve, whose points would hide it
        return
    for p in shown:
        yield (
            f'<circle cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(_hover(series.name, p, plot))}</title></circle>"
        )


def _hover(name: str, point: Point, plot: LinePlot) -> str:
    spread = f" ± {point.deviation:,.3g}" if point.deviation else ""
    return f"{name}: {point.y:,.4g}{spread} ({plot.y_label}) at {point.x:,g} ({plot.x_label})"


def _part_colour(part: str, number: int) -> str:
    """A cause of waiting has the dashboard's colour; other parts have theirs in turn."""
    return f"var(--{part})" if part in get_args(WaitCause) else f"var(--c{number % NUM_COLOURS})"


def _bars(plot: BarPlot) -> tuple[list[str], int]:
    legend, top = _legend(plot.parts, dashed=False)
    bottom = top + BAR_HEIGHT * len(plot.bars)
    x = axis([sum(values) for _, values in plot.bars], BAR_LABEL, WIDTH - RIGHT)
    body = [*legend, *_x_ticks(x, top, bottom, plot.x_label)]
    for row, (label, values) in enumerate(plot.bars):
        middle = top + BAR_HEIGHT * (row + 0.5)
        body.append(_text(BAR_LABEL - 8, middle + 4, label, anchor="end"))
        at = 0.0
        for number, (part, value) in enumerate(zip(plot.parts, values, strict=True)):
            if value <= 0:
                continue
            left, right = x(at), x(at + value)
            body.append(
                f'<rect x="{left:.1f}" y="{middle - 8:.1f}" width="{max(0.5, right - left):.1f}" '
                f'height="16" fill="{_part_colour(part, number)}">'
                f"<title>{escape(f'{label}, {part}: {value:,.4g}')}</title></rect>"
            )
            at += value
    return body, bottom + BOTTOM


def _legend(names: Sequence[str], *, dashed: bool) -> tuple[list[str], int]:
    """The legend, and where the plot may begin."""
    body: list[str] = []
    left, line = LEFT, 0
    for number, name in enumerate(names):
        width = 40 + 7 * len(name)
        if left + width > WIDTH and left > LEFT:
            left, line = LEFT, line + 1
        middle = 12 + LEGEND_LINE * line
        colour = f"var(--c{number % NUM_COLOURS})" if dashed else _part_colour(name, number)
        if dashed:
            dash = DASHES[number % len(DASHES)]
            body.append(
                f'<line class="line" stroke="{colour}" stroke-dasharray="{dash}" x1="{left}" '
                f'x2="{left + 24}" y1="{middle}" y2="{middle}"/>'
            )
        else:
            body.append(
                f'<rect x="{left + 10}" y="{middle - 6}" width="12" height="12" fill="{colour}"/>'
            )
        body.append(_text(left + 30, middle + 4, name))
        left += width
    return body, 14 + LEGEND_LINE * (line + 1)


def _frame(x: Axis, y: Axis, x_label: str, y_label: str) -> Iterable[str]:
    top, bottom = y.end, y.start
    for value in y.ticks:
        at = y(value)
        yield f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _text(x.start - 8, at + 4, tick_label(value), "soft", "end")
    yield from _x_ticks(x, top, bottom, x_label)
    middle = (top + bottom) / 2
    yield (
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )


def _x_ticks(x: Axis, top: float, bottom: float, label: str) -> Iterable[str]:
    yield f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{bottom}" y2="{bottom}"/>'
    for value in x.ticks:
        at = x(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>'
        yield _text(at, bottom + 18, tick_label(value), "soft", "middle")
    yield _text((x.start + x.end) / 2, bottom + 38, label, anchor="middle")


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
