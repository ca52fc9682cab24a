"""Check the engine's decoder on a CUDA device, then time it beside what else there is; 5 minutes.

    python benchmarks/gpu_engine.py [--json FILE]

Needs torch >= 2.11, triton >= 3.6, transformers >= 5.17, peft, safetensors, NumPy; no installation
of Loraplex. The model is a Llama-3-8B of random weights in bfloat16, made on the device. Nothing is
timed unless every value is right. `--tiny` runs every path on a CPU, kernels in Triton's
interpreter (TRITON_INTERPRET=1): its times mean nothing.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "--tiny" in sys.argv and "cuda" not in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import torch

from benchmarks.gpu_cases import Rates
from benchmarks.gpu_checks import hidden_waits, sanitized, wrong_values
from benchmarks.gpu_churn import token_gaps
from benchmarks.gpu_clock import Clock, DeviceClock, HostClock
from benchmarks.gpu_decode import Bench, adapter_pool_rows, floor_microseconds
from benchmarks.gpu_model import transformers_model
from benchmarks.gpu_peers import continuous_tokens_per_second, peft_tokens_per_second
from benchmarks.gpu_plan import FULL, SMALL, Plan, fitted, weight_bytes
from engine.device.setup import DeviceSetup, cuda_setup, interpreter_setup
from lora_kernels.device_kernels import rank_rows

TIME_LIMIT_SECONDS = 270.0
"""Cases that would begin later are left out, and counted."""


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table."""

    measure: str
    case: str
    value: float
    unit: str
    beside: float | None = None
    """What it is compared with, in the same unit."""
    of_what: str = ""

    @property
    def ratio(self) -> float | None:
        """Of the value to what it is compared with."""
        return self.value / self.beside if self.beside else None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a value is wrong, 2 if the device cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    device = options.device or ("cpu" if options.tiny else "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu_engine: there is no CUDA device here\n")
        return 2
    if device == "cpu" and not options.tiny:
        sys.stderr.write("gpu_engine: only --tiny runs on a CPU\n")
        return 2
    plan = SMALL if options.tiny else FULL
    started = time.monotonic()
    wrong = list(_checks(plan, device))
    sys.stderr.writelines(f"WRONG {line}\n" for line in wrong)
    if wrong:
        return 1
    if options.checks_only:
        print("all values are right")
        return 0
    notes = [_sanitizer_note()] if device == "cuda" else []
    print(f"{_name(device)}, torch {torch.__version__}, {plan.shape.name}; all values are right\n")
    results: list[Result] = []
    print(
        "| measure | case | value | unit | beside | of | ratio |\n|---|---|---:|---|---:|---|---:|"
    )
    for result in _measures(plan, device, started, notes):
        results.append(result)
        print(_line(result), flush=True)
    seconds = time.monotonic() - started
    print("\n" + "\n".join([*notes, f"{seconds:.0f} s"]))
    if options.json is not None:
        options.json.write_text(json.dumps(_document(device, plan, results, notes, seconds)))
    return 0


def _checks(plan: Plan, device: str) -> Iterator[str]:
    shape = plan.shape.with_layers(plan.check_layers)
    for dtype in (torch.float32, plan.dtype):
        bench = Bench(shape, _setup(device, 2, 16), dtype, sizes=(4,), context=48, max_tokens=128)
        yield from (f"{dtype}: {line}" for line in wrong_values(bench, (16, 3)))
    if device == "cuda":
        yield from hidden_waits(bench)


def _measures(plan: Plan, device: str, started: float, notes: list[str]) -> Iterator[Result]:
    clock: Clock = DeviceClock() if device == "cuda" else HostClock()
    rates = clock.rates()
    yield Result("copy bandwidth", "", rates.bytes_per_second / 1e12, "TB/s")
    yield Result("GEMM", "8192 x 8192 bfloat16", rates.flops_per_second / 1e12, "TFLOP/s")
    slots, rank = max(plan.adapters), max(plan.ranks)
    setup = _setup(device, slots, rank)
    if device == "cuda":
        torch.cuda.empty_cache()  # of the checks
    free = setup.device.facts().free
    plan, lacking = fitted(plan, free)
    notes += lacking
    free -= weight_bytes(plan.shape, plan.dtype)
    pool_rows = adapter_pool_rows(plan.shape, plan.dtype, free, rank_rows(slots, rank))
    bench = Bench(
        plan.shape, setup, plan.dtype, sizes=plan.batches, context=plan.context,
        max_tokens=max(plan.batches) + plan.peer_batch * plan.peer_prompt, pool_rows=pool_rows,
    )  # fmt: skip
    bench.fill_cache()
    grid = [
        (adapters, rank)
        for adapters in plan.adapters
        for rank in plan.ranks
        if adapters * -(-rank // 8) * 8 <= pool_rows
    ]
    if (missing := len(plan.adapters) * len(plan.ranks) - len(grid)) > 0:
        notes.append(f"left out for lack of memory: {missing} of the most and largest adapters")
    few, common = min(16, slots), min(16, rank)
    cases = [
        *((f"decode {batch}", _decode(bench, clock, rates, batch)) for batch in plan.batches),
        *(
            (f"adapters at {batch}", _lora(bench, clock, rates, batch, few, common))
            for batch in plan.batches
        ),
        ("churn", _churn(bench, plan)),
        ("peers", _peers(bench, plan, clock, notes)),
        *(
            (f"{adapters} of rank {rank}", _lora(bench, clock, rates, size, adapters, rank))
            for size in [plan.lora_batch]
            for adapters, rank in grid
        ),
    ]
    for name, results in cases:
        if device == "cuda" and time.monotonic() - started > TIME_LIMIT_SECONDS:
            notes.append(f"left out for lack of time: {name}")
        else:
            yield from results


def _decode(bench: Bench, clock: Clock, rates: Rates, batch: int) -> Iterator[Result]:
    position = bench.context - 1
    rows = bench.decode_rows(batch, 0, position)
    floor = floor_microseconds(bench.shape, rates, batch=batch, context=bench.context)
    graph = clock.microseconds(bench.prepared(rows))
    yield Result("decode step, graph", f"batch {batch}", graph, "us", floor, "its floor")
    eager = clock.microseconds(lambda: bench.eager(rows), is_captured=False)
    yield Result("decode step, eager", f"batch {batch}", eager, "us", graph, "the graph")


def _lora(
    bench: Bench, clock: Clock, rates: Rates, batch: int, adapters: int, rank: int
) -> Iterator[Result]:
    position = bench.context - 1
    used = min(adapters, batch)
    base = clock.microseconds(bench.prepared(bench.decode_rows(batch, 0, position)))
    bench.fill_slots(used, rank)
    time_ = clock.microseconds(bench.prepared(bench.decode_rows(batch, used, position)))
    case = f"batch {batch}, {used} adapters of rank {rank}"
    yield Result("decode step with adapters", case, time_, "us", base, "the base's")
    floor = floor_microseconds(
        bench.shape, rates, batch=batch, context=bench.context,
        adapter_rows=used * rank, row_ranks=batch * rank,
    )  # fmt: skip
    yield Result("decode step with adapters", case, time_, "us", floor, "its floor")


def _churn(bench: Bench, plan: Plan) -> Iterator[Result]:
    batch = min(32, max(plan.batches))
    calm, busy, installed = token_gaps(bench, batch, min(16, max(plan.ranks)), plan.churn_steps)
    case = f"batch {batch}, {installed} adapters loaded meanwhile"
    yield Result("token gap, median", case, busy.median, "us", calm.median, "without loads")
    yield Result("token gap, p99", case, busy.p99, "us", calm.p99, "without loads")


def _peers(bench: Bench, plan: Plan, clock: Clock, notes: list[str]) -> Iterator[Result]:
    batch, new_tokens = plan.peer_batch, plan.peer_tokens
    prompts = [
        [(3 + 5 * row + place) % bench.shape.vocab_size for place in range(plan.peer_prompt)]
        for row in range(batch)
    ]
    rank = min(16, max(plan.ranks))
    bench.fill_slots(plan.peer_adapters, rank)
    model = transformers_model(bench.weights, dtype=bench.dtype, device=bench.device)
    peft = partial(
        peft_tokens_per_second, model, prompts, num_adapters=plan.peer_adapters, rank=rank,
        new_tokens=new_tokens, wait=clock.wait,
    )  # fmt: skip
    batching = partial(
        continuous_tokens_per_second, model, prompts, new_tokens=new_tokens, wait=clock.wait
    )
    peers = {"PEFT adapter_names": (peft, True), "transformers batching": (batching, False)}
    for name, (measure, has_adapters) in peers.items():
        slots = plan.peer_adapters if has_adapters else 0
        ours = _our_tokens_per_second(bench, prompts, slots, new_tokens, clock)
        case = f"{batch} prompts of {plan.peer_prompt}, {new_tokens} tokens, {slots} adapters"
        try:
            theirs = measure()
        except (
            RuntimeError, ValueError, TypeError, ImportError, AttributeError, TimeoutError
        ) as error:  # fmt: skip
            notes.append(f"no {name}: {str(error).splitlines()[0] if str(error) else error!r}")
            theirs = None
        yield Result("tokens a second", case, ours, "tokens/s", theirs, name)


def _our_tokens_per_second(
    bench: Bench, prompts: list[list[int]], adapters: int, new_tokens: int, clock: Clock
) -> float:
    """Prefill in one step, then greedy steps, each token through the host as a server's is."""
    slots = [index % adapters if adapters else None for index in range(len(prompts))]

    def run() -> None:
        tokens = bench.eager(bench.rows(prompts, 0, slots)).argmax(-1).tolist()
        for step in range(new_tokens - 1):
            rows = bench.rows([[token] for token in tokens], len(prompts[0]) + step, slots)
            tokens = bench.graphed(rows).argmax(-1).tolist()

    run()
    clock.wait()
    began = time.perf_counter()
    run()
    clock.wait()
    return len(prompts) * new_tokens / (time.perf_counter() - began)


def _setup(device: str, max_loras: int, max_lora_rank: int) -> DeviceSetup:
    make = cuda_setup if device == "cuda" else interpreter_setup
    return make(max_loras=max_loras, max_lora_rank=max_lora_rank)


def _sanitizer_note() -> str:
    try:
        said = sanitized(60.0)
    except FileNotFoundError as error:
        return str(error)
    return "compute-sanitizer: clean" if said is None else f"compute-sanitizer: {said}"


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "a CPU, kernels interpreted"


def _line(result: Result) -> str:
    beside = "" if result.beside is None else f"{result.beside:.4g}"
    ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
    cells = (result.measure, result.case, f"{result.value:.4g}", result.unit, beside,
             result.of_what, ratio)  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _document(
    device: str, plan: Plan, results: list[Result], notes: list[str], seconds: float
) -> dict[str, object]:
    return {
        "device": _name(device),
        "torch": torch.__version__,
        "model": plan.shape.name,
        "seconds": seconds,
        "notes": notes,
        "results": [{**asdict(result), "ratio": result.ratio} for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
