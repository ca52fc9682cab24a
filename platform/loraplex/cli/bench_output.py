"""What `loraplex bench` found: as tables for its user, as files for other programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from engine.simulation.figures import Slo
from loraplex.cli.options import print_table, print_wide_table
from loraplex.load.figures import ModelFigures, after_warm_up, by_model
from loraplex.load.run import LoadRun, Loop

_SHOWN_QUEUE_MS = 0.05
"""What is not shown as 0.0."""
COLUMNS = (
    ("requests", "num_requests", 0), ("failed", "num_failed", 0),
    ("tokens/s", "output_tokens_per_second", 1), ("TTFT p50, ms", "ttft_p50_ms", 1),
    ("TTFT p99, ms", "ttft_p99_ms", 1), ("TPOT p50, ms", "tpot_p50_ms", 2),
    ("gap p99, ms", "gap_p99_ms", 1), ("queue p99, ms", "queue_p99_ms", 1),
    ("goodput", "goodput", 3), ("late p99, ms", "late_p99_ms", 1),
)  # fmt: skip


def write_runs(
    runs: Sequence[LoadRun], warm_up: float, jsonl_file: Path | None, json_file: Path | None
) -> None:
    """Write each call as a line of JSON, and the runs' figures as one document."""
    if jsonl_file is not None:
        with jsonl_file.open("wb") as file:
            for run in runs:
                for outcome in run.outcomes:
                    line = {"loop": run.loop.kind, "amount": run.loop.amount}
                    file.write(msgspec.json.encode(line | msgspec.structs.asdict(outcome)) + b"\n")
    if json_file is not None:
        rows: list[dict[str, Any]] = [
            {"loop": run.loop.kind, "rate": run.rate, "concurrency": run.concurrency}
            | asdict(run.figures)
            | {"models": [asdict(m) for m in by_model(after_warm_up(run.outcomes, warm_up))]}
            for run in runs
        ]
        saturation = max(run.figures.output_tokens_per_second for run in runs)
        document = {"rows": rows, "saturation": saturation}
        json_file.write_text(json.dumps(document, indent=1) + "\n")


def counted_requests(number: int) -> str:
    """`1 request`, `2,000 requests`."""
    return "1 request" if number == 1 else f"{number:,} requests"


def print_runs(runs: Sequence[LoadRun], warm_up: float, slo: Slo) -> None:
    """Print the runs' figures, and those of each model in the last one."""
    headings = ["load", *(heading for heading, _, _ in COLUMNS)]
    rows = [
        [run.loop.label, *(f"{getattr(run.figures, f):,.{d}f}" for _, f, d in COLUMNS)]
        for run in runs
    ]
    print_wide_table(headings, rows)
    num_sent = len(runs[-1].outcomes)
    counted = after_warm_up(runs[-1].outcomes, warm_up)
    click.echo()
    if num_first := num_sent - len(counted):
        click.echo(
            f"Sent in a run: {counted_requests(num_sent)}; the first {num_first:,} are its warm-up "
            f"and not counted (--warm-up {warm_up:g})."
        )
    click.echo(
        f"Goodput: the share with TTFT of {1e3 * slo.first_token:g} ms and TPOT of "
        f"{1e3 * slo.per_output_token:g} ms at most."
    )
    errors = sorted({outcome.error for outcome in counted if outcome.error is not None})
    if errors:
        click.echo(f"Failed with: {', '.join(errors[:8])}")
    _print_models(runs[-1].loop, by_model(counted))


def _print_models(loop: Loop, models: Sequence[ModelFigures]) -> None:
    """Model by model, where there are several or one has waited."""
    has_waited = any(ms >= _SHOWN_QUEUE_MS for m in models for ms in m.queue_ms.values())
    if len(models) < 2 and not has_waited:
        return
    click.echo(f"\nBy model, at {loop.label}")
    print_table(
        [
            "model", "requests", "failed", "TTFT p50, ms", "TTFT p99, ms", "queue p99, ms",
            "mean queue, ms",
        ],
        (
            [
                m.model, m.num_requests, m.num_failed, f"{m.ttft_p50_ms:,.1f}",
                f"{m.ttft_p99_ms:,.1f}", f"{m.queue_p99_ms:,.1f}",
                ", ".join(f"{cause} {ms:,.1f}" for cause, ms in m.queue_ms.items()
                          if ms >= _SHOWN_QUEUE_MS),
            ]
            for m in models
        ),
    )  # fmt: skip
