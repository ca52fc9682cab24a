"""`loraplex simulate`: policies and arrival rates, on the real scheduler in simulated time."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.simulation.figures import Slo
from engine.simulation.lengths import Lengths
from engine.simulation.model_shape import LLAMA_3_1_8B, ModelShape
from engine.simulation.popularity import Popularity
from engine.simulation.roofline import GPUS
from engine.simulation.study import POLICIES, Row, Study, run, run_jobs, spread
from engine.simulation.workload import replay
from loraplex.cli.options import print_table
from loraplex.cli.traffic_options import Spec, read_lengths, read_popularity, read_variation

if TYPE_CHECKING:
    from engine.simulation.published import Comparison

LENGTHS = Spec("lengths", read_lengths)
COLUMNS = (
    ("tokens/s", "output_tokens_per_second", 0), ("TTFT p50", "ttft_p50_ms", 0),
    ("TTFT p99", "ttft_p99_ms", 0), ("TPOT p50", "tpot_p50_ms", 1), ("gap p99", "gap_p99_ms", 1),
    ("queue p99", "queue_p99_ms", 0), ("goodput", "goodput", 2),
    ("rows used", "slot_efficiency", 2),
    ("preempted", "num_preemptions", 0),
)  # fmt: skip


@click.command()
@click.option(
    "--preset",
    type=click.Choice(["seeds"]),
    help="Compare with published figures; of other options only the last three count.",
)
@click.option(
    "--model",
    default=LLAMA_3_1_8B.name,
    show_default=True,
    help="A model folder (its config.json is read), or the built-in one.",
)
@click.option(
    "--gpu", type=click.Choice([gpu.name for gpu in GPUS]), default="H100", show_default=True
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice([policy.name for policy in POLICIES]),
    multiple=True,
    help="Repeat; all by default.",
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
    "--prompts",
    type=LENGTHS,
    default="lognormal:1000:0.8:32:8192",
    show_default=True,
    help="Tokens: fixed:N, lognormal:MEAN[:SIGMA[:SHORTEST:LONGEST]] or @FILE, a number a line.",
)
@click.option("--outputs", type=LENGTHS, default="lognormal:250:0.8:8:2048", show_default=True)
@click.option(
    "--arrivals",
    "variation",
    type=Spec("arrivals", read_variation),
    default="poisson",
    show_default=True,
    help="poisson, gamma:VARIATION or bursty.",
)
@click.option(
    "--adapters",
    "num_adapters",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="0: all requests are for the base model.",
)
@click.option(
    "--popularity",
    type=Spec("popularity", read_popularity),
    default="zipf",
    show_default=True,
    help="Of adapters: uniform, zipf[:EXPONENT] or hot[:SHARE].",
)
@click.option(
    "--tenants",
    "num_tenants",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Who own the adapters in turn.",
)
@click.option("--max-loras", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--load-ms",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="An adapter's way to host memory.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay JSONL: at, prompt_tokens, output_tokens, tenant, adapter.",
)
@click.option("--max-model-len", type=click.IntRange(2), default=10_241, show_default=True)
@click.option(
    "--kv-blocks",
    "num_kv_blocks",
    type=click.IntRange(1),
    help="Of 16 tokens; default: what the GPU's memory holds.",
)
@click.option("--slo-ttft-ms", type=click.FloatRange(0), default=500.0, show_default=True)
@click.option("--slo-tpot-ms", type=click.FloatRange(0), default=80.0, show_default=True)
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of each kind, each with random arrivals and lengths of its own.",
)
@click.option(
    "--processes",
    "num_processes",
    type=click.IntRange(1),
    default=os.cpu_count() or 1,
    show_default="one a core",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write all rows to this file.",
)  # fmt: skip
def simulate(
    preset: str | None, num_seeds: int, num_processes: int, json_file: Path | None, **traffic: Any
) -> None:
    """Simulate policies on a GPU that need not be there.

    The scheduler is the one that serves; a step takes what the roofline says. Figures are means
    over the seeds, with the standard deviation of single runs behind ±; times in milliseconds.
    """
    from engine.errors import ConfigError
    from engine.simulation import published
    from engine.simulation.workload import TraceError

    comparisons: list[Comparison] = []
    try:
        if preset:
            jobs = published.jobs(num_seeds)
            rows = _collect(run_jobs(jobs, num_processes=num_processes), len(jobs))
            comparisons = published.compare(rows)
        else:
            rows = _run(num_seeds=num_seeds, num_processes=num_processes, **traffic)
    except (ConfigError, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_text(json.dumps(_document(rows, comparisons), indent=1) + "\n")
    _print_rows(rows)
    if comparisons:
        click.echo()
        _print_comparisons(comparisons)
        if not all(comparison.holds for comparison in comparisons):
            raise click.exceptions.Exit(1)


def _run(
    *,
    model: str,
    gpu: str,
    policies: Sequence[str],
    rates: Sequence[float],
    num_requests: int,
    prompts: Lengths,
    outputs: Lengths,
    variation: float | None,
    num_adapters: int,
    popularity: Callable[[int], Popularity],
    num_tenants: int,
    max_loras: int,
    load_ms: float,
    trace: Path | None,
    max_model_len: int,
    num_kv_blocks: int | None,
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    num_seeds: int,
    num_processes: int,
) -> list[Row]:
    study = Study(
        model=LLAMA_3_1_8B if model == LLAMA_3_1_8B.name else ModelShape.read(Path(model)),
        gpu=next(known for known in GPUS if known.name == gpu),
        prompts=prompts,
        outputs=outputs,
        num_requests=num_requests,
        max_model_len=max_model_len,
        num_kv_blocks=num_kv_blocks,
        variation=variation,
        popularity=popularity(num_adapters) if num_adapters else None,
        num_tenants=num_tenants,
        max_loras=max_loras,
        load_seconds=load_ms / 1e3,
        trace=None if trace is None else replay(trace),
        slo=Slo(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3),
    )
    chosen = [policy for policy in POLICIES if policy.name in policies or not policies]
    if trace is not None:  # its own times, and nothing random
        rates, num_seeds = (0.0,), 1
    rows = run(study, chosen, rates, range(num_seeds), num_processes=num_processes)
    return _collect(rows, len(chosen) * len(rates) * num_seeds)


def _value(row: Row, field: str) -> float:
    return float(getattr(row.figures, field))


def _collect(rows: Iterator[Row], number: int) -> list[Row]:
    with click.progressbar(rows, length=number, label="Simulating", file=sys.stderr) as progress:
        return list(progress)


def _groups(rows: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.rate), []).append(row)
    return groups


def _document(rows: Sequence[Row], comparisons: Sequence["Comparison"]) -> dict[str, Any]:
    saturation: dict[str, float] = {}
    for (policy, _), group in _groups(rows).items():
        mean = spread(group, lambda row: row.figures.output_tokens_per_second).mean
        saturation[policy] = max(mean, saturation.get(policy, 0.0))
    document: dict[str, Any] = {"rows": [row.as_dict() for row in rows], "saturation": saturation}
    if comparisons:
        document["published"] = [asdict(c) | {"holds": c.holds} for c in comparisons]
    return document


def _print_rows(rows: Sequence[Row]) -> None:
    def cell(group: Sequence[Row], field: str, digits: int) -> str:
        found = spread(group, lambda row: _value(row, field))
        return f"{found.mean:,.{digits}f} ± {found.deviation:,.{digits}f}"

    print_table(
        ["policy", "requests/s", *(heading for heading, _, _ in COLUMNS)],
        (
            [policy, f"{rate:g}" if rate else "trace", *(cell(group, *c[1:]) for c in COLUMNS)]
            for (policy, rate), group in _groups(rows).items()
        ),
    )


def _print_comparisons(comparisons: Sequence["Comparison"]) -> None:
    print_table(
        ["quantity", "published", "ours", "±", "tolerance", ""],
        (
            [
                c.quantity,
                f"{c.lowest:,g}" if c.lowest == c.highest else f"{c.lowest:,g} to {c.highest:,g}",
                f"{c.ours.mean:,.4g}",
                f"{c.ours.deviation:,.2g}" if c.ours.deviation else None,
                f"{c.tolerance:.0%}",
                "ok" if c.holds else "OFF",
            ]
            for c in comparisons
        ),
    )
