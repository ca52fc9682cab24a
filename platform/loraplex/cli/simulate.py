"""`loraplex simulate`: policies and arrival rates, on the real scheduler in simulated time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from engine.simulation.fleet import Fleet, simulate_fleet
from engine.simulation.routing import ROUTINGS, Routing
from engine.simulation.study import (
    POLICIES,
    NamedPolicy,
    Row,
    Study,
    run,
    run_jobs,
)
from loraplex.cli.counted_work import CountedWork
from loraplex.cli.simulate_output import ENOUGH_SEEDS, Findings, print_findings, write_findings
from loraplex.cli.study_options import make_study, study_options

NUM_SEEDS = 3


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
                found = Findings(study, rows)
    except (ConfigError, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    write_findings(found, json_file, html_file)
    print_findings(found)
    if not found.holds:
        raise click.exceptions.Exit(1)


def _failures(num_processes: int) -> Findings:
    from engine.simulation import failure_modes

    jobs = failure_modes.jobs()
    what = "each failure mode, then its cure"
    rows = _collect(run_jobs(jobs, num_processes=num_processes), len(jobs), what)
    return Findings(failure_modes.STUDY, rows, recognised=failure_modes.recognise(rows))


def _published(num_seeds: int, num_processes: int, *, has_curves: bool) -> Findings:
    from engine.simulation import published

    jobs = published.jobs(num_seeds, with_curves=has_curves)
    what = (
        f"{len(jobs) // num_seeds} pairs of policy and rate of the published study; "
        f"{_size(published.STUDY.num_requests, num_seeds)}"
    )
    rows = _collect(run_jobs(jobs, num_processes=num_processes), len(jobs), what)
    comparisons = published.compare(rows)
    return Findings(published.STUDY, rows, comparisons=comparisons, num_seeds=num_seeds)


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
