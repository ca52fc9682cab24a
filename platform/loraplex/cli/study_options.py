"""What is simulated, as `loraplex simulate` and `loraplex plan` are told it."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from engine.simulation.figures import Slo
from engine.simulation.fitted import StepModel, read_step_model
from engine.simulation.lengths import CappedLength, EmpiricalLength, Lengths
from engine.simulation.model_shape import LLAMA_3_1_8B, ModelShape
from engine.simulation.popularity import Popularity, weighted
from engine.simulation.roofline import GPUS
from engine.simulation.study import Study
from engine.simulation.workload import Arrival, replay
from loraplex.cli.traffic_options import (
    file_options,
    slo_options,
    traffic_options,
    traffic_settings,
)

T = TypeVar("T")
DEFAULT_MAX_MODEL_LEN = 10_241


def study_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add all of it, and `num_processes`, `json_file` and `html_file`."""
    for option in (
        file_options,
        click.option(
            "--processes", "num_processes", type=click.IntRange(1), default=os.cpu_count() or 1,
            show_default="one a core",
        ),
        slo_options,
        click.option(
            "--kv-blocks", "num_kv_blocks", type=click.IntRange(1),
            help="Of 16 tokens; default: what the GPU's memory holds.",
        ),
        click.option("--max-model-len", type=click.IntRange(2)),
        click.option(
            "--load-ms", type=click.FloatRange(0), help="An adapter's way to host memory.",
            show_default="30, or what was measured",
        ),
        click.option(
            "--adapter-rank", type=click.IntRange(1), default=16, show_default=True,
            help="Of all linear layers: what a slot takes of the memory.",
        ),
        click.option(
            "--tenants", "num_tenants", type=click.IntRange(1), default=1, show_default=True,
            help="Who own the adapters in turn.",
        ),
        click.option(
            "--adapters", "num_adapters", type=click.IntRange(0), default=0, show_default=True,
            help="0: all requests are for the base model.",
        ),
        traffic_options,
        click.option(
            "--step-model", type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A measured engine instead of --model and --gpu: see docs/capacity.md.",
        ),
        click.option(
            "--gpu", type=click.Choice([gpu.name for gpu in GPUS]), default="H100",
            show_default=True,
        ),
        click.option(
            "--model", default=LLAMA_3_1_8B.name, show_default=True,
            help="A model folder (its config.json is read), or the built-in one.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def make_study(
    *, model: str, gpu: str, step_model: Path | None, prompts: Lengths, outputs: Lengths,
    variation: float | None, num_adapters: int, popularity: Callable[[int], Popularity],
    num_tenants: int, max_loras: int, adapter_rank: int, load_ms: float | None, trace: Path | None,
    max_model_len: int | None, num_kv_blocks: int | None, slo: Slo, num_requests: int,
) -> Study:  # fmt: skip
    """The study that the options describe. Raises ConfigError, TraceError or OSError."""
    measured = None if step_model is None else read_step_model(step_model)
    known = model == LLAMA_3_1_8B.name
    return Study(
        model=LLAMA_3_1_8B if known else ModelShape.read(Path(model)),
        gpu=next(known for known in GPUS if known.name == gpu),
        prompts=prompts,
        outputs=outputs,
        num_requests=num_requests,
        variation=variation,
        popularity=popularity(num_adapters) if num_adapters else None,
        num_tenants=num_tenants,
        adapter_rank=adapter_rank,
        num_kv_blocks=num_kv_blocks,
        trace=None if trace is None else replay(trace),
        slo=slo,
        **_machine(measured, max_loras, max_model_len, load_ms),
    )


def like_trace(study: Study) -> tuple[Study, float]:
    """Lengths and popularity as a trace has them, to draw any number of requests; and its rate."""
    arrivals: Sequence[Arrival] = study.trace or ()
    if len(arrivals) < 2 or arrivals[-1][0] <= 0:
        raise click.ClickException("the trace is too short to tell a rate")
    adapters = Counter(r.adapter for _, r in arrivals if r.adapter is not None)
    fields: dict[str, Any] = {
        "trace": None,
        "prompts": EmpiricalLength([len(r.prompt_token_ids) for _, r in arrivals]),
        "outputs": EmpiricalLength([r.sampling.max_tokens for _, r in arrivals]),
        "popularity": weighted([n for _, n in adapters.most_common()]) if adapters else None,
    }
    return replace(study, **fields), len(arrivals) / arrivals[-1][0]


def settings_of(study: Study) -> list[tuple[str, str]]:
    """What a report is headed with."""
    measured = study.step_model
    machine = (
        [("model", study.model.name), ("GPU", study.gpu.name), ("GPU figures", study.gpu.source)]
        if measured is None
        else [("measured on", measured.machine or "a machine that is not named")]
    )
    traffic = (
        [
            *traffic_settings(study.variation, study.prompts, _capped(study)),
            ("requests", _counted(study, study.num_requests)),
            ("adapters", _adapters(study)),
        ]
        if study.trace is None
        else [("trace", _counted(study, len(study.trace)))]
    )
    return [
        *machine,
        *traffic,
        ("KV blocks", f"{study.kv_blocks:,} of {study.block_size} tokens"),
        ("SLO", f"TTFT {1e3 * study.slo.first_token:g} ms, "
                f"TPOT {1e3 * study.slo.per_output_token:g} ms"),
    ]  # fmt: skip


def _machine(
    measured: StepModel | None, max_loras: int, max_model_len: int | None, load_ms: float | None
) -> dict[str, Any]:
    seconds = 0.03 if load_ms is None else load_ms / 1e3
    if measured is None:
        return {
            "max_loras": max_loras, "load_seconds": seconds,
            "max_model_len": max_model_len or DEFAULT_MAX_MODEL_LEN,
        }  # fmt: skip
    return {
        "step_model": measured,
        "max_loras": measured.max_loras,
        "max_cpu_loras": measured.max_cpu_loras,
        "block_size": measured.block_size,
        "load_seconds": measured.load_seconds if load_ms is None else seconds,
        "max_model_len": max_model_len or measured.max_model_len,
    }


def _capped(study: Study) -> Lengths:
    cap = study.max_tokens
    return study.outputs if cap is None else CappedLength(study.outputs, cap)


def _counted(study: Study, num_requests: int) -> str:
    return f"{num_requests:,} requests, the first {study.warm_up:.0%} not counted"


def _adapters(study: Study) -> str:
    if study.popularity is None:
        return "none: all is for the base model"
    shares = study.popularity.cumulative
    rank = "" if study.step_model else f"; rank {study.adapter_rank}"
    return (
        f"{len(shares):,} of {study.num_tenants:,} tenants; the most popular has "
        f"{shares[0] / shares[-1]:.1%} of the requests{rank}; {1e3 * study.load_seconds:g} ms to "
        "host memory"
    )
