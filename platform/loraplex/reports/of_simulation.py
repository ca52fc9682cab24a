"""The report of a study: policies against arrival rates, as means over random seeds."""

import math
from collections.abc import Sequence

from engine.simulation.failure_modes import Recognised
from engine.simulation.published import Comparison
from engine.simulation.study import Groups, Row, grouped, spread
from loraplex.reports.of_alerts import alert_section, alerts, recognised_table
from loraplex.reports.of_queues import last_waits, queue_section
from loraplex.reports.plots import (
    LinePlot,
    Point,
    Report,
    Section,
    Series,
    TextTable,
)

LINES = (
    ("Output tokens a second", "output_tokens_per_second", "tokens/s", "linear"),
    ("Time to first token, median", "ttft_p50_ms", "ms", "log"),
    ("Time per output token, median", "tpot_p50_ms", "ms", "linear"),
    ("Gap between two tokens, 99th percentile", "gap_p99_ms", "ms", "log"),
    ("Goodput", "goodput", "share of requests", "linear"),
    ("KV blocks in use, mean", "kv_use", "share of blocks", "linear"),
)  # fmt: skip
COLUMNS = (
    ("tokens/s", "output_tokens_per_second", 0), ("TTFT p50", "ttft_p50_ms", 0),
    ("TTFT p99", "ttft_p99_ms", 0), ("TPOT p50", "tpot_p50_ms", 1), ("gap p99", "gap_p99_ms", 1),
    ("queue p99", "queue_p99_ms", 0), ("goodput", "goodput", 2),
    ("rows used", "slot_efficiency", 2), ("KV used", "kv_use", 2), ("slots", "slots_used", 1),
    ("preempted", "num_preemptions", 0), ("loads", "num_installs", 0),
)  # fmt: skip


def cell(group: Sequence[Row], field: str, digits: int) -> str:
    """A figure's mean, and the deviation of single seeds where there are several."""
    found = spread(group, lambda row: float(getattr(row.figures, field)))
    mean, deviation = (f"{x:,.{digits}f}" for x in (found.mean, found.deviation))
    return f"{mean} ± {deviation}" if deviation.strip("0.") else mean


def rounded(value: float, digits: int) -> str:
    """A number of so many significant digits, never with an exponent: `12,440`, `0.0031`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".rpartition("e")[2])
    decimals = digits - 1 - exponent
    text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain_range(low: float, high: float) -> str:
    """`1,200`, or `1,200 to 1,300`."""
    ends = (rounded(low, 6), rounded(high, 6))
    return ends[0] if low == high else " to ".join(ends)


def simulation_report(
    rows: Sequence[Row],
    comparisons: Sequence[Comparison],
    settings: Sequence[tuple[str, str]],
) -> Report:
    """Of at least one row."""
    groups = grouped(rows)
    num_seeds = max(len(group) for group in groups.values())
    title, waits = last_waits(groups)
    queues = queue_section(waits, title)
    sections = [*_curves(groups), alert_section(alerts(rows)), *queues, _all(groups)]
    if comparisons:
        sections.insert(0, _published(comparisons))
    spread_words = (
        f"Means over {num_seeds} random seeds; shaded: the standard deviation of single runs."
        if num_seeds > 1
        else "One random seed, which says little of rare stalls."
    )
    best = _best(groups)
    return Report(
        title="Simulation",
        lead=f"The scheduler that serves, in simulated time. {spread_words}",
        facts=[
            ("most good requests/s", f"{best[2]:,.1f}"),
            ("policy", best[0]),
            ("at, requests/s", f"{best[1]:g}" if best[1] else "trace"),
            ("seeds", f"{num_seeds}"),
        ],
        sections=sections,
        settings=settings,
    )


def failure_report(rows: Sequence[Row], recognised: Sequence[Recognised]) -> Report:
    """Of the failure modes, whose runs are no sweep."""
    table = recognised_table(recognised)
    return Report(
        title="Failure modes",
        lead="Each made in simulated time, on the scheduler that serves, and cured.",
        facts=[
            ("named by their alerts", f"{sum(one.is_named for one in recognised)}"),
            ("silent once cured", f"{sum(one.is_silent for one in recognised)}"),
            ("of", f"{len(recognised)}"),
        ],
        sections=[
            Section(title="The failure modes, each by its alert", table=table),
            alert_section(alerts(rows)),
            _all(grouped(rows)),
        ],
    )


def curves(groups: Groups, title: str, field: str, y_label: str, scale: str) -> Section:
    """One figure over the arrival rate, a line for each policy."""
    series: dict[str, list[Point]] = {}
    for (policy, rate), group in sorted(groups.items(), key=lambda item: item[0][1]):
        found = spread(group, lambda row: float(getattr(row.figures, field)))
        series.setdefault(policy, []).append(Point(rate, found.mean, found.deviation))
    order = list(dict.fromkeys(policy for policy, _ in groups))
    plot = LinePlot(
        x_label="requests/s",
        y_label=y_label,
        series=[Series(policy, series[policy]) for policy in order],
        y_scale="log" if scale == "log" else "linear",
    )
    return Section(title=title, plot=plot)


def _curves(groups: Groups) -> list[Section]:
    if len({rate for _, rate in groups}) < 2:
        return []
    return [curves(groups, *line) for line in LINES]


def _all(groups: Groups) -> Section:
    return Section(
        title="All figures",
        text="Times in milliseconds.",
        table=TextTable(
            ["policy", "requests/s", *(heading for heading, _, _ in COLUMNS)],
            [
                [policy, f"{rate:g}" if rate else "trace", *(cell(group, *c[1:]) for c in COLUMNS)]
                for (policy, rate), group in groups.items()
            ],
        ),
    )


def _published(comparisons: Sequence[Comparison]) -> Section:
    rows: list[list[str]] = []
    for c in comparisons:
        deviation = rounded(c.ours.deviation, 2) if c.ours.deviation else "-"
        rows.append(
            [
                c.quantity, plain_range(c.lowest, c.highest), rounded(c.ours.mean, 4), deviation,
                f"{c.tolerance:.0%}", "holds" if c.holds else "off",
            ]
        )  # fmt: skip
    return Section(
        title="The published figures, recomputed",
        table=TextTable(["quantity", "published", "ours", "±", "tolerance", ""], rows),
    )


def _best(groups: Groups) -> tuple[str, float, float]:
    """Policy, rate, and requests a second that meet the SLO."""

    def good(group: Sequence[Row]) -> float:
        def one(row: Row) -> float:
            figures = row.figures
            seconds = figures.seconds
            return figures.goodput * figures.num_requests / seconds if seconds else 0.0

        return spread(group, one).mean

    (policy, rate), group = max(groups.items(), key=lambda item: good(item[1]))
    return policy, rate, good(group)
