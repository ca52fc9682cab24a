"""`loraplex simulate`: policies and arrival rates, on the real scheduler in simulated time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.simulation.fleet import Fleet, simulate_fleet
from engine.simulation.routing import ROUTINGS, Routing
from engine.simulation.study import (
    POLICIES,
    NamedPolicy,
    Row,
    Study,
    grouped,
    run,
    run_jobs,
    spread,
)
from loraplex.cli.counted_work import CountedWork
from loraplex.cli.options import print_table, print_wide_table
from loraplex.cli.study_options import make_study, settings_of, study_options
from loraplex.reports.of_alerts import alert_lines, alerts, recognised_table
from loraplex.reports.of_queues import last_waits, queue_table
from loraplex.reports.of_simulation import COLUMNS, cell, plain_range, rounded

if TYPE_CHECKING:
    from engine.simulation.failure_modes import Recognised
    from engine.simulation.published import Comparison

NUM_SEEDS = 3
ENOUGH_SEEDS = 10
"""Of the published study: a mean of so many strays less than what is allowed it."""
SHOWN_ADAPTERS = 5


@click.command()
@click.option(
    "--preset",
    type=click.Choice(["seeds", "failures"]),
    help="seeds: compare with an article's figures. failures: make each failure mode, and its "
    "cure. Other options count as far as they write files.",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice([policy.name for policy in POLICIES]),
    multiple=True,
    help="Repeat; all by default, and a measured engine's own with --step-model.",
)
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    default=(4.0, 8.0, 16.0),
    show_default=True,
    help="Requests a second; repeat.",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(1),
    default=1500,
    show_default=True,
    help="In a run, of which the first tenth is not counted.",
)
@click.option(
    "--replicas", "num_replicas", type=click.IntRange(1), default=1, show_default=True,
    help="Behind a router; rates and requests are of all together.",
)  # fmt: skip
@click.option(
    "--routing", type=click.Choice(ROUTINGS), default="affinity", show_default=True,
    help="affinity: an adapter's requests go to few replicas.",
)  # fmt: skip
@click.option("--max-loras", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--max-tokens", type=click.IntRange(1),
    help="What clients allow a reply; without, each ends by itself.",
)  # fmt: skip
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1),
    show_default=f"{NUM_SEEDS}; {ENOUGH_SEEDS} of --preset seeds",
    help="Runs of each kind, each with random arrivals and lengths of its own.",
)
@study_options
def simulate(
    *, preset: str | None, policies: Sequence[str], rates: Sequence[float], num_seeds: int | None,
    num_replicas: int, routing: Routing, num_processes: int, max_tokens: int | None,
    json_file: Path | None, html_file: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Simulate policies on a GPU that need not be there.

    The scheduler is the one that serves; a step takes what the roofline says, or what a measured
    engine took. Figures are means over the seeds, with the standard deviation of single runs behind
    ±; times in milliseconds. Below: what the alerts of the service would say.
    """
    from engine.errors import ConfigError
    from engine.simulation.workload import TraceError

    try:
        match preset:
            case "failures":
                found = _failures(num_processes)
            case "seeds":
                has_curves = html_file is not None
                found = _published(num_seeds or ENOUGH_SEEDS, num_processes, has_curves=has_curves)
            case _:
                study = replace(make_study(**options), max_tokens=max_tokens)
                chosen, num_seeds = _policies(study, policies), num_seeds or NUM_SEEDS
                if num_replicas == 1:
                    rows = _run(study, chosen, rates, num_seeds, num_processes)
                else:
                    fleets = [
                        Fleet(
                            study=study, policy=policy, rate=rate, num_replicas=num_replicas,
                            routing=routing, seed=seed,
                        )
                        for seed, policy, rate in product(range(num_seeds), chosen, rates)
                    ]  # fmt: skip
                    rows = _run_fleets(fleets, num_processes)
                found = _Found(study, rows)
    except (ConfigError, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_text(json.dumps(_document(found), indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(_report(found))
    _print(found)
    if not found.holds:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True, slots=True)
class _Found:
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


def _failures(num_processes: int) -> _Found:
    from engine.simulation import failure_modes

    jobs = failure_modes.jobs()
    what = "each failure mode, then its cure"
    rows = _collect(run_jobs(jobs, num_processes=num_processes), len(jobs), what)
    return _Found(failure_modes.STUDY, rows, recognised=failure_modes.recognise(rows))


def _published(num_seeds: int, num_processes: int, *, has_curves: bool) -> _Found:
    from engine.simulation import published

    jobs = published.jobs(num_seeds, with_curves=has_curves)
    what = (
        f"{len(jobs) // num_seeds} pairs of policy and rate of the published study; "
        f"{_size(published.STUDY.num_requests, num_seeds)}"
    )
    rows = _collect(run_jobs(jobs, num_processes=num_processes), len(jobs), what)
    comparisons = published.compare(rows)
    return _Found(published.STUDY, rows, comparisons=comparisons, num_seeds=num_seeds)


def _policies(study: Study, names: Sequence[str]) -> list[NamedPolicy]:
    chosen = [policy for policy in POLICIES if policy.name in names or not names]
    measured = study.step_model
    if measured is None:
        return chosen
    budget = measured.max_num_batched_tokens
    own = NamedPolicy(f"chunked_{budget}", "chunked", measured.max_num_seqs, budget)
    return [own, *chosen] if names else [own]


def _run(
    study: Study, policies: Sequence[NamedPolicy], rates: Sequence[float], num_seeds: int,
    num_processes: int,
) -> list[Row]:  # fmt: skip
    if study.trace is not None:  # its own times, and nothing random
        rates, num_seeds = (0.0,), 1
    rows = run(study, policies, rates, range(num_seeds), num_processes=num_processes)
    at = "of the trace" if study.trace is not None else f"at {_listed(rates)} requests/s"
    num_requests = study.num_requests if study.trace is None else len(study.trace)
    names = ", ".join(policy.name for policy in policies)
    what = f"{names} {at}; {_size(num_requests, num_seeds)}"
    return _collect(rows, len(policies) * len(rates) * num_seeds, what)


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _size(num_requests: int, num_seeds: int) -> str:
    return f"requests of a run: {num_requests:,}; seeds: {num_seeds}"


def _run_fleets(fleets: Sequence[Fleet], num_processes: int) -> list[Row]:
    rows: list[Row] = []
    if any(fleet.study.trace is not None for fleet in fleets):
        raise click.UsageError("--trace is replayed on one replica")
    for number, fleet in enumerate(fleets, 1):
        total = fleet.study.num_requests
        what = (
            f"Simulating run {number} of {len(fleets)}: {fleet.policy.name} on "
            f"{fleet.num_replicas} replicas at {fleet.rate:g} requests/s, {total:,} requests ..."
        )
        with CountedWork(what, total) as work:
            found = simulate_fleet(fleet, num_processes=num_processes, on_progress=work.update)
        figures = found.as_figures(fleet.study.kv_blocks)
        width = fleet.policy.max_num_seqs
        rows.append(
            Row(
                fleet.policy.name, width, fleet.rate, fleet.seed, figures,
                found.adapter_waits(), fleet.num_replicas, tuple(found.sightings),
            )
        )  # fmt: skip
    return rows


def _collect(rows: Iterator[Row], number: int, what: str) -> list[Row]:
    """The rows of so many runs; `what` says of which."""
    collected: list[Row] = []
    runs = "1 run" if number == 1 else f"{number:,} runs"
    with CountedWork(f"Simulating {runs}: {what} ...", number) as work:
        for row in rows:
            collected.append(row)
            work.update(len(collected), f"last {row.policy} at {row.rate:g}/s, seed {row.seed}")
    return collected


def _document(found: _Found) -> dict[str, Any]:
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


def _report(found: _Found) -> str:
    from loraplex.reports.html import render
    from loraplex.reports.of_simulation import failure_report, simulation_report

    if found.recognised:
        return render(failure_report(found.rows, found.recognised))
    settings = settings_of(found.study)
    return render(simulation_report(found.rows, found.comparisons, settings))


def _print(found: _Found) -> None:
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
