"""The simulator against our engine: fit a step model to it, then predict what it does.

    python -m benchmarks.reality [--seconds S] [--json FILE] [--step-model FILE]

A real `loraplex serve` on SmolLM2-135M with 8 adapters on 8 slots, in four rounds. A round begins
with a calibration: closed loops of 1, 4, 12 and 32 calls. Then come open loops at three fractions
of the rate that saturates the engine. A step model is fitted to the steps of all calibrations,
none of the open loops; the same arrivals, lengths and adapters are simulated with it. A machine
that others share does not stay as fast: a round is simulated at the speed of its own calibration,
in proportion to the fit. Output tokens a second are to agree within 10%, the median time to first
token within 20%: means over the rounds. Takes 8 minutes with 60 seconds a rate; nothing else
should run.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.serving.figures import machine, markdown, write_json
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import BASE, OurService, our_service
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from benchmarks.step_watcher import StepWatcher, watched
from engine.simulation.figures import Figures, Slo
from engine.simulation.fitted import StepModel, fit_steps, median_seconds, scaled, slowness
from engine.simulation.lengths import LognormalLength
from engine.simulation.model_shape import ModelShape
from engine.simulation.popularity import zipf
from engine.simulation.roofline import H100
from engine.simulation.study import NamedPolicy, Study, simulate
from engine.telemetry.records import RequestRecord, StepRecord
from loraplex.cli.api_client import ApiClient
from loraplex.load.calls import CallFormat
from loraplex.load.figures import LoadFigures
from loraplex.load.run import LoadRun, Loop, run_load

ADAPTERS = 8
PROMPTS = LognormalLength(mean=128, sigma=0.6, shortest=16, longest=512)
OUTPUTS = LognormalLength(mean=64, sigma=0.6, shortest=8, longest=192)
CALIBRATION = ((1, 8), (4, 24), (12, 60), (32, 160))
"""Calls under way, and how many in all."""
FRACTIONS = (0.4, 0.6, 0.8)
ROUNDS = 4
SLO = Slo(first_token=1.0, per_output_token=0.1)
WARM_UP = 0.1
TOKENS_TOLERANCE, TTFT_TOLERANCE = 0.10, 0.20


@dataclass(frozen=True, slots=True)
class Compared:
    """One rate: what was measured and what was simulated, as means over the rounds."""

    rate: float
    measured: dict[str, float]
    simulated: dict[str, float]

    def ratio(self, figure: str) -> float:
        """Simulated over measured."""
        return self.simulated[figure] / self.measured[figure]

    @property
    def holds(self) -> bool:
        """Whether both figures agree."""
        tokens, ttft = self.ratio("output_tokens_per_second"), self.ratio("ttft_p50_ms")
        return abs(tokens - 1) <= TOKENS_TOLERANCE and abs(ttft - 1) <= TTFT_TOLERANCE


FIGURES = (
    ("tokens/s", "output_tokens_per_second"), ("TTFT p50 ms", "ttft_p50_ms"),
    ("TTFT p99 ms", "ttft_p99_ms"), ("TPOT p50 ms", "tpot_p50_ms"), ("gap p99 ms", "gap_p99_ms"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the engine recorded under closed loops, and clients saw of it."""

    steps: Sequence[StepRecord]
    requests: Sequence[RequestRecord]
    service_seconds: float
    """A first token's, besides the engine."""
    saturation: float
    """Requests a second."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An open loop, and what its clients saw."""

    number: int
    """Of its round."""
    study: Study
    rate: float
    seed: int
    figures: LoadFigures


def study_of(model: Path, num_requests: int) -> Study:
    """The traffic of all runs."""
    return Study(
        model=ModelShape.read(model), gpu=H100, prompts=PROMPTS, outputs=OUTPUTS,
        num_requests=num_requests, popularity=zipf(ADAPTERS), slo=SLO, warm_up=WARM_UP,
    )  # fmt: skip


def load(service: OurService, study: Study, loop: Loop, seed: int) -> LoadRun:
    """Send a study's requests to the service."""
    form = CallFormat(model=BASE, adapters=adapter_names(ADAPTERS))
    calls = list(form.calls(study.requests(loop.amount or 1.0, seed), seed))
    run = asyncio.run(
        run_load(
            f"{service.url}/", loop, calls, key=service.key, tenant_keys={}, warm_up=WARM_UP,
            slo=SLO,
        )
    )  # fmt: skip
    if run.figures.num_failed:
        errors = {outcome.error for outcome in run.outcomes if outcome.error}
        raise SystemExit(f"{run.figures.num_failed} calls failed: {errors}")
    return run


def calibrate(
    service: OurService, study: Study, process: psutil.Process, seed: int, share: float
) -> Calibration:
    """Closed loops of each width."""
    beside = saturation = 0.0
    with watched(process) as watcher:
        for number, (concurrency, count) in enumerate(CALIBRATION):
            begun = len(watcher.requests)
            count = max(4, 2 * concurrency, round(share * count))
            loop = Loop("closed", concurrency)
            run = load(service, replace(study, num_requests=count), loop, seed + number)
            saturation = run.figures.requests_per_second
            if concurrency == 1:
                time.sleep(1.0)  # until the watcher has read them
                beside = _beside_the_engine(run, watcher, begun)
    if watcher.num_missed:
        raise SystemExit(f"{watcher.num_missed} records were overwritten before they were read")
    return Calibration(watcher.steps, watcher.requests, beside, saturation)


def _beside_the_engine(run: LoadRun, watcher: StepWatcher, begun: int) -> float:
    seen = statistics.median(outcome.ttft for outcome in run.outcomes)
    inside = [record.ttft for record in watcher.requests[begun:] if record.ttft is not None]
    return max(0.0, seen - statistics.median(inside))


def fit(service: OurService, rounds: Sequence[Calibration]) -> StepModel:
    """The service's step model, from the steps of all rounds."""
    with ApiClient(service.service.url, service.service.admin_key) as admin:
        info = admin.call("GET", "/admin/engine/info")
    found = fit_steps([step for one in rounds for step in one.steps], info["block_size"])
    loads = [r.load_seconds for one in rounds for r in one.requests if r.load_seconds > 0]
    return StepModel(
        costs=found.costs,
        mean_error=found.mean_error,
        num_steps=found.num_steps,
        load_seconds=median_seconds(loads, 0.03),
        service_seconds=statistics.median(one.service_seconds for one in rounds),
        machine=machine(),
        **{
            name: info[name]
            for name in (
                "num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
                "max_model_len", "max_loras", "max_cpu_loras",
            )
        },
    )  # fmt: skip


def simulated(sent: Sent, model: StepModel, speed: float) -> Figures:
    """The very same requests, on an engine that takes `speed` times as long as the model says.

    Its adapters take no time to load: the service's have been in their slots since the calibration.
    """
    study = replace(
        sent.study, step_model=msgspec.structs.replace(model, costs=scaled(model.costs, speed)),
        max_loras=model.max_loras, max_cpu_loras=model.max_cpu_loras,
        block_size=model.block_size, max_model_len=model.max_model_len,
        load_seconds=0.0,
    )  # fmt: skip
    budget = model.max_num_batched_tokens
    policy = NamedPolicy(f"chunked_{budget}", "chunked", model.max_num_seqs, budget)
    return simulate(study, policy, sent.rate, sent.seed).figures


def compare(runs: Sequence[Sent], model: StepModel, speeds: Sequence[float]) -> list[Compared]:
    """Rate by rate, over the rounds."""
    found: list[Compared] = []
    for rate in dict.fromkeys(sent.rate for sent in runs):
        same = [sent for sent in runs if sent.rate == rate]
        predicted = [simulated(sent, model, speeds[sent.number]) for sent in same]
        found.append(Compared(rate, _means([sent.figures for sent in same]), _means(predicted)))
    return found


def _means(figures: Sequence[Figures] | Sequence[LoadFigures]) -> dict[str, float]:
    return {name: statistics.fmean(getattr(one, name) for one in figures) for _, name in FIGURES}


def table(found: Sequence[Compared]) -> str:
    """Measured, simulated and their ratio, rate by rate."""
    rows: list[list[str]] = []
    for one in found:
        for name, values in (("measured", one.measured), ("simulated", one.simulated)):
            rows.append([f"{one.rate:.2f}/s {name}", *(f"{values[f]:,.1f}" for _, f in FIGURES)])
        rows.append(["ratio", *(f"{one.ratio(f):.2f}" for _, f in FIGURES)])
    return markdown(["", *(name for name, _ in FIGURES)], rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each of the three rates")
    parser.add_argument("--quick", action="store_true", help="two short rounds, to try it")
    parser.add_argument("--step-model", type=Path, help="where to leave the fitted model")
    options = parser.parse_args()
    num_rounds = 2 if options.quick else ROUNDS
    share, seconds = 1 / ROUNDS, options.seconds / ROUNDS
    model = model_dir(options)
    started = time.monotonic()
    print(machine(), flush=True)
    rounds: list[Calibration] = []
    runs: list[Sent] = []
    with (
        tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder,
        our_service(model, ["--max-loras", str(ADAPTERS)]) as service,
    ):
        service.push(write_adapters(model, Path(folder), adapter_names(ADAPTERS)))
        process = psutil.Process(service.service.process.pid)
        for number in range(num_rounds):
            study = study_of(model, 1)
            rounds.append(calibrate(service, study, process, 100 + 10 * number, share))
            for fraction in FRACTIONS:
                rate = fraction * rounds[0].saturation
                study = study_of(model, max(20, round(rate * seconds)))
                seed = len(runs)
                run = load(service, study, Loop("open", rate), seed)
                runs.append(Sent(number, study, rate, seed, run.figures))
        fitted = fit(service, rounds)
    speeds = [slowness(fitted.costs, one.steps, fitted.block_size) for one in rounds]
    if options.step_model is not None:
        options.step_model.write_bytes(msgspec.json.encode(fitted) + b"\n")
    saturations = [one.saturation for one in rounds]
    print(
        f"saturated at {', '.join(f'{rate:.2f}' for rate in saturations)} requests/s; fitted to "
        f"{fitted.num_steps} steps, of which one is off by {fitted.mean_error:.1%}: {fitted.costs}"
        f"\nin its rounds the machine took {', '.join(f'{s:.3f}' for s in speeds)} times as long",
        flush=True,
    )
    found = compare(runs, fitted, speeds)
    print(f"\n{table(found)}\n\n{time.monotonic() - started:.0f} s; {machine()}")
    document: dict[str, Any] = {
        "machine": machine(),
        "saturation_requests_per_second": saturations,
        "slowness": speeds,
        "step_model": msgspec.to_builtins(fitted),
        "rates": [asdict(one) for one in found],
    }
    write_json(options.json, document)
    if not all(one.holds for one in found):
        raise SystemExit("the simulation is off")


if __name__ == "__main__":
    main()
