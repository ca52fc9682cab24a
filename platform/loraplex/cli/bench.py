"""`loraplex bench`: load on any OpenAI-compatible endpoint, and what its clients saw."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, get_args

import click
import msgspec

from engine.simulation.arrivals import bursty, gamma
from engine.simulation.figures import Slo
from engine.simulation.lengths import Lengths
from engine.simulation.popularity import Popularity
from engine.simulation.workload import Arrival, TraceError, Traffic, replay
from loraplex.cli.api_client import KEY_SOURCES, START_ONE
from loraplex.cli.counted_work import CountedWork
from loraplex.cli.options import print_table, print_wide_table
from loraplex.cli.traffic_options import (
    Spec,
    file_options,
    read_new_file,
    slo_options,
    traffic_options,
    traffic_settings,
)
from loraplex.load.calls import Api, CallFormat
from loraplex.load.figures import after_warm_up, by_model
from loraplex.load.models import EndpointError, KeyRefused, NoAnswer, check_models, first_model
from loraplex.load.run import LoadRun, Loop, run_load
from loraplex.reports.html import render
from loraplex.reports.of_load import load_report

T = TypeVar("T")

_INTERRUPTED = 130
"""The exit status, as of whatever Ctrl-C ends."""
_SHOWN_QUEUE_MS = 0.05
"""What is not shown as 0.0."""
COLUMNS = (
    ("requests", "num_requests", 0), ("failed", "num_failed", 0),
    ("tokens/s", "output_tokens_per_second", 1), ("TTFT p50, ms", "ttft_p50_ms", 1),
    ("TTFT p99, ms", "ttft_p99_ms", 1), ("TPOT p50, ms", "tpot_p50_ms", 2),
    ("gap p99, ms", "gap_p99_ms", 1), ("queue p99, ms", "queue_p99_ms", 1),
    ("goodput", "goodput", 3), ("late p99, ms", "late_p99_ms", 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to send, of all loops."""

    format: CallFormat
    arrivals: Callable[[float], Sequence[Arrival]]
    """At so many requests a second; of a closed loop the times do not count."""


@click.command()
@click.option(
    "--url", envvar="LORAPLEX_URL", default="http://127.0.0.1:8000", show_default=True,
    help="The service, with or without /v1. Also read from LORAPLEX_URL.",
)  # fmt: skip
@click.option("--api-key", envvar="LORAPLEX_API_KEY", help="Also read from LORAPLEX_API_KEY.")
@click.option(
    "--tenant-key", "tenant_keys", multiple=True, metavar="TENANT=KEY",
    help="A key for the requests of this tenant (t0, t1 ... or a trace's names); repeat.",
)  # fmt: skip
@click.option("--model", help="Asked for where no adapter is; default: the first that is listed.")
@click.option(
    "--adapter", "adapters", multiple=True,
    help="An adapter to ask for; repeat, the most popular one first.",
)  # fmt: skip
@click.option(
    "--api", type=click.Choice(get_args(Api)), default="completions", show_default=True,
    help="completions: prompts of exactly so many token ids. chat: of about so many words.",
)  # fmt: skip
@click.option(
    "--rate", "rates", type=click.FloatRange(min=0, min_open=True), multiple=True,
    help="Open loop: requests a second; repeat for a sweep.",
)  # fmt: skip
@click.option(
    "--concurrency", "concurrencies", type=click.IntRange(1), multiple=True,
    help="Closed loop: calls under way; repeat.",
)  # fmt: skip
@click.option(
    "--requests", "num_requests", type=click.IntRange(1), default=200, show_default=True,
    help="In a run.",
)  # fmt: skip
@traffic_options
@click.option(
    "--tenants", "num_tenants", type=click.IntRange(1), default=1, show_default=True,
    help="Who own the adapters in turn; each may have a --tenant-key.",
)  # fmt: skip
@click.option(
    "--any-length", is_flag=True,
    help="Send OpenAI's own fields only: replies may end before their length.",
)  # fmt: skip
@click.option(
    "--warm-up", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True,
    help="The share of a run's requests, the first ones, that is not counted.",
)  # fmt: skip
@click.option(
    "--timeout", "silence", type=click.FloatRange(min=0, min_open=True), default=120.0,
    show_default=True, help="Seconds of silence after which a call has failed.",
)  # fmt: skip
@slo_options
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--jsonl", "jsonl_file", type=Spec("file", read_new_file),
    help="Write every call to this file: its times, tokens, error, and queue time by cause.",
)  # fmt: skip
@file_options
def bench(
    *, url: str, api_key: str | None, tenant_keys: Sequence[str], model: str | None,
    adapters: Sequence[str], api: Api, rates: Sequence[float], concurrencies: Sequence[int],
    num_requests: int, prompts: Lengths, outputs: Lengths, variation: float | None,
    popularity: Callable[[int], Popularity], trace: Path | None, num_tenants: int,
    any_length: bool, warm_up: float, silence: float, slo: Slo, seed: int,
    jsonl_file: Path | None, json_file: Path | None, html_file: Path | None,
) -> None:  # fmt: skip
    """Load an endpoint, and measure what its clients see.

    An open loop (--rate) sends at its times whatever became of earlier calls; latencies count from
    when a call was due. A closed loop (--concurrency) keeps calls under way.
    """
    loops = [*(Loop("open", rate) for rate in rates), *(Loop("closed", c) for c in concurrencies)]
    if not loops:
        loops = [Loop("open", 0.0)] if trace else [Loop("closed", 8)]
    keys = _tenant_keys(tenant_keys)
    replayed = None if trace is None else _replayed(trace)

    def arrivals(rate: float) -> list[Arrival]:
        if replayed is not None:
            return _at_rate(replayed, rate)
        shape = variation
        traffic = Traffic(
            arrivals=lambda random: (
                bursty(rate, random) if shape is None else gamma(rate, shape, random)
            ),
            prompts=prompts, outputs=outputs, num_requests=num_requests,
            popularity=popularity(len(adapters)) if adapters else None, num_tenants=num_tenants,
        )  # fmt: skip
        return list(traffic.requests(seed))

    base_url = url.rstrip("/").removesuffix("/v1") + "/v1/"
    model = model or _asked(first_model(base_url, api_key, silence))
    plan = _Plan(
        format=CallFormat(api=api, model=model, adapters=adapters, is_exact=not any_length),
        arrivals=arrivals,
    )
    runs: list[LoadRun] = []
    is_interrupted = False
    checked: set[tuple[str | None, str]] = set()
    for loop in loops:
        workload = plan.arrivals(loop.amount or 1.0)
        calls = list(plan.format.calls(workload, seed))
        asked = {(keys.get(call.tenant, api_key), call.model) for call in calls}
        _asked(check_models(base_url, sorted(asked - checked, key=str), silence))
        checked |= asked
        what = f"{loop.label}: sending {_requests(len(calls))} to {base_url}: {_size(workload)} ..."
        work = CountedWork(what, len(calls))
        try:
            with work:
                run = asyncio.run(
                    run_load(
                        base_url, loop, calls, key=api_key, tenant_keys=keys, silence=silence,
                        warm_up=warm_up, slo=slo, on_progress=work.update,
                    )
                )  # fmt: skip
        except KeyboardInterrupt:
            _tell_interrupted(work.done, len(calls), runs)
            is_interrupted = True
            break
        runs.append(run)
    if not runs:
        raise click.exceptions.Exit(_INTERRUPTED)
    _write(runs, warm_up, jsonl_file, json_file)
    if html_file is not None:
        settings = [
            ("endpoint", base_url), ("model", model), ("adapters", ", ".join(adapters) or "none"),
            *(
                traffic_settings(variation, prompts, outputs) if replayed is None
                else [("trace", f"{len(replayed):,} requests")]
            ),
            ("SLO", f"TTFT {1e3 * slo.first_token:g} ms, TPOT {1e3 * slo.per_output_token:g} ms"),
        ]  # fmt: skip
        html_file.write_text(render(load_report(runs, warm_up, settings)))
    _print(runs, warm_up, slo)
    if is_interrupted:
        raise click.exceptions.Exit(_INTERRUPTED)
    if all(run.figures.num_failed == run.figures.num_requests for run in runs):
        raise click.exceptions.Exit(1)


def _tenant_keys(pairs: Sequence[str]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for pair in pairs:
        tenant, separator, key = pair.partition("=")
        if not (tenant and separator and key):
            raise click.BadParameter("must be TENANT=KEY", param_hint="--tenant-key")
        keys[tenant] = key
    return keys


def _replayed(trace: Path) -> list[Arrival]:
    try:
        arrivals = replay(trace)
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not arrivals:
        raise click.ClickException(f"{trace} holds no request")
    return arrivals


def _at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """A trace in its own time, or sped up or slowed down to a mean rate."""
    span = arrivals[-1][0]
    if rate <= 0 or span <= 0:
        return list(arrivals)
    factor = len(arrivals) / span / rate
    return [(at * factor, request) for at, request in arrivals]


def _asked(answer: Coroutine[Any, Any, T]) -> T:
    """What an endpoint answers before load is sent; what it cannot do ends the command."""
    try:
        return asyncio.run(answer)
    except NoAnswer as error:
        raise click.ClickException(f"{error}; {START_ONE}") from error
    except KeyRefused as error:
        raise click.ClickException(f"{error}. {KEY_SOURCES}") from error
    except EndpointError as error:
        raise click.ClickException(str(error)) from error


def _write(
    runs: Sequence[LoadRun], warm_up: float, jsonl_file: Path | None, json_file: Path | None
) -> None:
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


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number:,} requests"


def _size(workload: Sequence[Arrival]) -> str:
    prompts = [len(request.prompt_token_ids) for _, request in workload]
    replies = [request.sampling.max_tokens for _, request in workload]
    return (
        f"prompts of {fmean(prompts):,.0f} tokens and replies of {fmean(replies):,.0f} on average, "
        f"{sum(prompts) + sum(replies):,} tokens in all"
    )


def _tell_interrupted(num_done: int, num_calls: int, finished: Sequence[LoadRun]) -> None:
    before = f"; before it: {', '.join(run.loop.label for run in finished)}" if finished else ""
    click.echo(
        f"Interrupted: {num_done:,} of {_requests(num_calls)} had ended. Nothing is reported of "
        f"this run{before}.",
        err=True,
    )


def _print(runs: Sequence[LoadRun], warm_up: float, slo: Slo) -> None:
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
            f"Sent in a run: {_requests(num_sent)}; the first {num_first:,} are its warm-up and "
            f"not counted (--warm-up {warm_up:g})."
        )
    click.echo(
        f"Goodput: the share with TTFT of {1e3 * slo.first_token:g} ms and TPOT of "
        f"{1e3 * slo.per_output_token:g} ms at most."
    )
    errors = sorted({outcome.error for outcome in counted if outcome.error is not None})
    if errors:
        click.echo(f"Failed with: {', '.join(errors[:8])}")
    models = by_model(counted)
    has_waited = any(ms >= _SHOWN_QUEUE_MS for m in models for ms in m.queue_ms.values())
    if len(models) > 1 or has_waited:
        click.echo(f"\nBy model, at {runs[-1].loop.label}")
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
