"""`loraplex bench`: load on any OpenAI-compatible endpoint, and what its clients saw."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, get_args

import click

from engine.simulation.arrivals import bursty, gamma
from engine.simulation.figures import Slo
from engine.simulation.lengths import Lengths
from engine.simulation.popularity import Popularity
from engine.simulation.workload import Arrival, TraceError, Traffic, replay
from loraplex.cli.api_client import KEY_SOURCES, START_ONE
from loraplex.cli.bench_output import counted_requests, print_runs, write_runs
from loraplex.cli.counted_work import CountedWork
from loraplex.cli.traffic_options import (
    Spec,
    file_options,
    read_new_file,
    slo_options,
    traffic_options,
    traffic_settings,
)
from loraplex.load.calls import Api, CallFormat
from loraplex.load.models import EndpointError, KeyRefused, NoAnswer, check_models, first_model
from loraplex.load.run import LoadRun, Loop, run_load
from loraplex.reports.html import render
from loraplex.reports.of_load import load_report

T = TypeVar("T")

_INTERRUPTED = 130
"""The exit status, as of whatever Ctrl-C ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """Where calls go, and with which keys."""

    base_url: str
    """Ends with `/v1/`."""
    key: str | None
    tenant_keys: Mapping[str, str]
    silence: float
    """Seconds of it after which a call has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to send in each loop, and how it is judged."""

    format: CallFormat
    arrivals: Callable[[float], Sequence[Arrival]]
    """At so many requests a second; of a closed loop the times do not count."""
    seed: int
    warm_up: float
    """The share of a run's calls that is not counted."""
    slo: Slo


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

    endpoint = _Endpoint(
        base_url=url.rstrip("/").removesuffix("/v1") + "/v1/", key=api_key,
        tenant_keys=_tenant_keys(tenant_keys), silence=silence,
    )  # fmt: skip
    model = model or _asked(first_model(endpoint.base_url, api_key, silence))
    plan = _Plan(
        format=CallFormat(api=api, model=model, adapters=adapters, is_exact=not any_length),
        arrivals=arrivals, seed=seed, warm_up=warm_up, slo=slo,
    )  # fmt: skip
    runs, is_interrupted = _run_loops(endpoint, plan, loops)
    if not runs:
        raise click.exceptions.Exit(_INTERRUPTED)
    write_runs(runs, warm_up, jsonl_file, json_file)
    if html_file is not None:
        settings = [
            ("endpoint", endpoint.base_url), ("model", model),
            ("adapters", ", ".join(adapters) or "none"),
            *(
                traffic_settings(variation, prompts, outputs) if replayed is None
                else [("trace", f"{len(replayed):,} requests")]
            ),
            ("SLO", f"TTFT {1e3 * slo.first_token:g} ms, TPOT {1e3 * slo.per_output_token:g} ms"),
        ]  # fmt: skip
        html_file.write_text(render(load_report(runs, warm_up, settings)))
    print_runs(runs, warm_up, slo)
    if is_interrupted:
        raise click.exceptions.Exit(_INTERRUPTED)
    if all(run.figures.num_failed == run.figures.num_requests for run in runs):
        raise click.exceptions.Exit(1)


def _run_loops(
    endpoint: _Endpoint, plan: _Plan, loops: Sequence[Loop]
) -> tuple[list[LoadRun], bool]:
    """One loop after the other; the runs that came to their end, and whether Ctrl-C cut one short.

    Before each it is asked whether its models are served, with the keys that they are asked with.
    """
    runs: list[LoadRun] = []
    checked: set[tuple[str | None, str]] = set()
    for loop in loops:
        workload = plan.arrivals(loop.amount or 1.0)
        calls = list(plan.format.calls(workload, plan.seed))
        asked = {
            (endpoint.tenant_keys.get(call.tenant, endpoint.key), call.model) for call in calls
        }
        new = sorted(asked - checked, key=str)
        _asked(check_models(endpoint.base_url, new, endpoint.silence))
        checked |= asked
        where = f"{counted_requests(len(calls))} to {endpoint.base_url}"
        work = CountedWork(f"{loop.label}: sending {where}: {_size(workload)} ...", len(calls))
        try:
            with work:
                run = asyncio.run(
                    run_load(
                        endpoint.base_url, loop, calls, key=endpoint.key,
                        tenant_keys=endpoint.tenant_keys, silence=endpoint.silence,
                        warm_up=plan.warm_up, slo=plan.slo, on_progress=work.update,
                    )
                )  # fmt: skip
        except KeyboardInterrupt:
            _tell_interrupted(work.done, len(calls), runs)
            return runs, True
        runs.append(run)
    return runs, False


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
        f"Interrupted: {num_done:,} of {counted_requests(num_calls)} had ended. Nothing is "
        f"reported of this run{before}.",
        err=True,
    )
