"""What `loraplex simulate` found: as tables for its user, as files for other programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.simulation.study import Row, Study, grouped, spread
from loraplex.cli.options import print_table, print_wide_table
from loraplex.cli.study_options import settings_of
from loraplex.reports.of_alerts import alert_lines, alerts, recognised_table
from loraplex.reports.of_queues import last_waits, queue_table
from loraplex.reports.of_simulation import COLUMNS, cell, plain_range, rounded

if TYPE_CHECKING:
    from engine.simulation.failure_modes import Recognised
    from engine.simulation.published import Comparison

ENOUGH_SEEDS = 10
"""Of the published study: a mean of so many strays less than what is allowed it."""
SHOWN_ADAPTERS = 5


@dataclass(frozen=True, slots=True)
class Findings:
    """What was simulated, and with a preset what it was compared with."""

    study: Study
    rows: Sequence[Row]
    comparisons: Sequence["Comparison"] = ()
    recognised: Sequence["Recognised"] = ()
    num_seeds: int = 1
    """Behind each comparison."""

    @property
    def holds(self) -> bool:
        """Whether a preset's comparison came out as it should."""
        return all(one.holds for one in (*self.comparisons, *self.recognised))


def write_findings(found: Findings, json_file: Path | None, html_file: Path | None) -> None:
    """The files that were asked for; raises `OSError`."""
    if json_file is not None:
        json_file.write_text(json.dumps(_document(found), indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(_report(found))


def _document(found: Findings) -> dict[str, Any]:
    saturation: dict[str, float] = {}
    for (policy, _), group in grouped(found.rows).items():
        mean = spread(group, lambda row: row.figures.output_tokens_per_second).mean
        saturation[policy] = max(mean, saturation.get(policy, 0.0))
    document: dict[str, Any] = {
        "rows": [row.as_dict() for row in found.rows], "saturation": saturation,
    }  # fmt: skip
    if found.comparisons:
        document["published"] = [asdict(c) | {"holds": c.holds} for c in found.comparisons]
    if found.recognised:
        document["failures"] = [
            {
                "kind": one.mode.kind, "made_by": one.mode.made_by, "is_named": one.is_named,
                "cured_by": one.mode.cured_by, "is_silent_when_cured": one.is_silent,
            }
            for one in found.recognised
        ]  # fmt: skip
    return document


def _report(found: Findings) -> str:
    from loraplex.reports.html import render
    from loraplex.reports.of_simulation import failure_report, simulation_report

    if found.recognised:
        return render(failure_report(found.rows, found.recognised))
    settings = settings_of(found.study)
    return render(simulation_report(found.rows, found.comparisons, settings))


def print_findings(found: Findings) -> None:
    """Figures, waits, alerts, and with a preset what came of its comparison."""
    _print_rows(found.rows)
    if not found.recognised:
        _print_waits(found.rows)
    click.echo("\nAlerts")
    click.echo("\n".join(alert_lines(alerts(found.rows))))
    if found.recognised:
        click.echo()
        table = recognised_table(found.recognised)
        print_table(table.columns, table.rows)
    if found.comparisons:
        click.echo()
        _print_comparisons(found.comparisons, found.num_seeds)


def _print_rows(rows: Sequence[Row]) -> None:
    print_wide_table(
        ["policy", "requests/s", *(heading for heading, _, _ in COLUMNS)],
        [
            [policy, f"{rate:g}" if rate else "trace", *(cell(group, *c[1:]) for c in COLUMNS)]
            for (policy, rate), group in grouped(rows).items()
        ],
    )


def _print_waits(rows: Sequence[Row]) -> None:
    title, waits = last_waits(grouped(rows))
    table = queue_table(waits[:SHOWN_ADAPTERS])
    if table is not None:
        click.echo(f"\n{title}")
        print_table(table.columns, table.rows)


def _print_comparisons(comparisons: Sequence["Comparison"], num_seeds: int) -> None:
    print_table(
        ["quantity", "published", "ours", "±", "tolerance", ""],
        (
            [
                c.quantity,
                plain_range(c.lowest, c.highest),
                rounded(c.ours.mean, 4),
                rounded(c.ours.deviation, 2) if c.ours.deviation else None,
                f"{c.tolerance:.0%}",
                "ok" if c.holds else "OFF",
            ]
            for c in comparisons
        ),
    )
    if num_seeds < ENOUGH_SEEDS:
        click.echo(
            f"\n{num_seeds} seeds are few: a mean of them strays by ± / √{num_seeds}, so that what "
            f"is OFF may be chance. Without --seeds there are {ENOUGH_SEEDS}."
        )
