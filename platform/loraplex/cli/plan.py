"""`loraplex plan`: how many replicas, seats and slots a traffic needs under an SLO."""

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from engine.simulation.plan import Demand, Plan, Setup, Trial, attempt, plan
from loraplex.cli.counted_work import CountedWork
from loraplex.cli.options import print_table
from loraplex.cli.study_options import like_trace, make_study, settings_of, study_options
from loraplex.reports.html import render
from loraplex.reports.of_plan import load_table, plan_report
from loraplex.reports.of_queues import TITLE, queue_table
from loraplex.reports.plan_answers import answers, load_words

SHOWN_ADAPTERS = 5


@click.command("plan")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True),
    help="Requests a second, in all; a trace has its own.",
)  # fmt: skip
@click.option(
    "--goodput", "share", type=click.FloatRange(0, 1, min_open=True), default=0.95,
    show_default=True, help="The share of requests that is to meet the SLO.",
)  # fmt: skip
@click.option("--gpu-price", type=click.FloatRange(0), help="Of a GPU-hour, in whichever currency.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option(
    "--requests", "num_requests", type=click.IntRange(10), default=1000, show_default=True,
    help="Of a replica in each trial; more take longer, and tell more of rare stalls.",
)  # fmt: skip
@study_options
def plan_command(
    *, rate: float | None, share: float, gpu_price: float | None, max_num_batched_tokens: int,
    num_processes: int, json_file: Path | None, html_file: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Size a deployment: replicas, max_num_seqs, max_loras, KV memory, cost.

    Tries setups in simulated time, on the scheduler that serves. The operating point is where most
    requests a second meet the SLO. Times in milliseconds.
    """
    from engine.errors import ConfigError
    from engine.simulation.workload import TraceError

    try:
        study = make_study(max_loras=1, **options)
        if study.trace is not None:
            study, own_rate = like_trace(study)
            rate = rate or own_rate
        if rate is None:
            raise click.UsageError("--rate is missing: how many requests a second are to be served")
        demand = Demand(
            study=study, rate=rate, share=share, max_num_batched_tokens=max_num_batched_tokens
        )
        found = _plan(demand, num_processes)
    except (ConfigError, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_text(json.dumps(_document(demand, found, gpu_price), indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(
            render(plan_report(demand, found, gpu_price, settings_of(demand.study)))
        )
    print_table(["", "", "because"], answers(demand, found, gpu_price))
    click.echo(f"\n{load_words(demand, found)}\n")
    table = load_table(found)
    print_table(table.columns, table.rows)
    waits = queue_table(found.expected.figures.adapter_waits(SHOWN_ADAPTERS))
    if waits is not None:
        click.echo(f"\n{TITLE}, of the demand")
        print_table(waits.columns, waits.rows)
    if not found.meets_slo:
        raise click.exceptions.Exit(1)


def _plan(demand: Demand, num_processes: int) -> Plan:
    num_trials = 0
    what = f"Planning for {demand.rate:g} requests/s: simulating what deployments would do ..."
    with (
        ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool,
        CountedWork(what) as work,
    ):

        def run(jobs: Sequence[tuple[Demand, Setup]]) -> list[Trial]:
            results = (
                map(attempt, *zip(*jobs, strict=True))
                if num_processes == 1
                else pool.map(attempt, *zip(*jobs, strict=True))
            )
            nonlocal num_trials
            trials: list[Trial] = []
            for trial in results:
                trials.append(trial)
                num_trials += 1
                work.update(num_trials, f"last {_words(trial.setup)}")
            return trials

        return plan(demand, run)


def _words(setup: Setup) -> str:
    return (
        f"{setup.num_replicas} replicas, {setup.rate:.2f} requests/s each, "
        f"{setup.max_num_seqs} seats, {setup.max_loras} slots"
    )


def _document(demand: Demand, found: Plan, gpu_price: float | None) -> dict[str, Any]:
    hours = found.gpu_hours_per_million
    return {
        "rate": demand.rate,
        "goodput_wanted": demand.share,
        "meets_slo": found.meets_slo,
        "replicas": found.num_replicas,
        "max_num_seqs": found.max_num_seqs,
        "max_num_batched_tokens": max(demand.max_num_batched_tokens, found.max_num_seqs),
        "max_loras": found.max_loras,
        "kv_blocks": found.kv_blocks,
        "kv_bytes": found.kv_blocks
        * demand.study.block_size
        * demand.study.model.kv_bytes_per_token,
        "gpu_hours_per_million_output_tokens": hours,
        "cost_per_million_output_tokens": None if gpu_price is None else gpu_price * hours,
        "burst_requests_per_second_per_replica": found.burst_rate,
        "why": {line.label: line.why for line in answers(demand, found, gpu_price)},
        "findings": [
            asdict(seen.finding) | {"replica": seen.replica}
            for seen in found.expected.figures.sightings
        ],
        "adapters": [asdict(wait) for wait in found.expected.figures.adapter_waits()],
        "operating_point": _row(found.operating),
        "expected": _row(found.expected),
        "by_load": [_row(trial) for trial in found.by_load],
        "by_max_num_seqs": [_row(trial) for trial in found.by_seats],
        "by_max_loras": [_row(trial) for trial in found.by_slots],
    }


def _row(trial: Trial) -> dict[str, Any]:
    figures, setup = trial.figures, trial.setup
    use = figures.use
    return {
        "replicas": setup.num_replicas,
        "max_num_seqs": setup.max_num_seqs,
        "max_loras": setup.max_loras,
        "rate_per_replica": setup.rate,
        "output_tokens_per_second_per_replica": trial.tokens_per_second,
        "good_requests_per_second_per_replica": trial.good_per_second,
        "goodput": figures.goodput,
        **{
            f"{name}_{label}_ms": 1e3 * getattr(figures, name).quantile(share)
            for name in ("ttft", "tpot", "gap", "queue")
            for label, share in (("p50", 0.5), ("p99", 0.99))
        },
        "kv_blocks_peak": use.kv_peak,
        "kv_blocks_mean": use.mean(use.kv_seconds),
        "slots_mean": use.mean(use.slot_seconds),
        "running_mean": use.mean(use.running_seconds),
        "preemptions": figures.num_preemptions,
        "loads": figures.num_installs,
        "queue_ms": {
            cause: 1e3 * seconds / max(1, figures.num_requests)
            for cause, seconds in figures.queue_seconds.items()
        },
        "adapters": {
            adapter: {
                "requests": tally.num_requests,
                "ttft_mean_ms": 1e3 * tally.ttft_seconds / tally.num_requests,
                "longest_wait_ms": 1e3 * tally.longest_wait,
                "queue_ms": {
                    cause: 1e3 * seconds / tally.num_requests
                    for cause, seconds in tally.queue.items()
                },
            }
            for adapter, tally in sorted(
                figures.adapters.items(), key=lambda item: -sum(item[1].queue.values())
            )[:100]
        },
    }
