"""What a quantised base costs and saves on a CPU, beside the same model as it was saved.

    python -m benchmarks.quantized_steps [--schemes NAME ...] [--passes N] [--minutes M]
        [--model DIR] [--cpu-seconds] [--json FILE]

Real schedulers and real runners in this process, one for each way to hold the layers' weights. They
take turns, pass by pass: a prefill of 512 tokens, then steps in which 1, 8 and 32 sequences decode
at a context of about 50 tokens, half of them with adapters. Ratios are taken within a pass;
`--cpu-seconds` counts one thread's own time: for machines that others use.
Needs `loraplex[quantization]`.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_lab import EngineLab, random_prompt, read_adapters
from benchmarks.serving.figures import machine, markdown, write_json
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from engine.quantization.choose import QUANTIZATIONS
from engine.runner.build_runner import BuiltRunner, build_runner

BASE = "bfloat16"
CONTEXT = 48
CHUNK = 512
BATCHES = (1, 8, 32)
STEPS = 6
NUM_ADAPTERS = 4


@dataclass(slots=True)
class Contender:
    """One engine, and what its steps took in each pass: milliseconds by kind of step."""

    name: str
    built: BuiltRunner
    adapters: Mapping[str, Any]
    layer_bytes: int
    passes: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def run_pass(self, clock: Callable[[], int], number: int) -> None:
        """One step of a prefill, and the median of some decode steps of each batch."""
        self.passes.append(
            {f"prefill {CHUNK}": self._prefill(clock, number)}
            | {f"decode {batch}": self._decode(clock, batch, number) for batch in BATCHES}
        )

    def _prefill(self, clock: Callable[[], int], number: int) -> float:
        lab = self._lab()
        lab.add(random_prompt(self.built.vocab_size, CHUNK, number), 2)
        took = _timed(clock, lab.step)
        lab.abort_all()
        return took

    def _decode(self, clock: Callable[[], int], batch: int, number: int) -> float:
        lab = self._lab()
        digests = list(self.adapters)
        for index in range(batch):
            adapter = digests[index % len(digests)] if index % 2 else None
            prompt = random_prompt(self.built.vocab_size, CONTEXT, number, index)
            lab.add(prompt, STEPS + 4, adapter)
        lab.step_until(lambda: lab.core.stats().running == batch and lab.core.stats().waiting == 0)
        lab.step()
        took = statistics.median(_timed(clock, lab.step) for _ in range(STEPS))
        lab.abort_all()
        return took

    def _lab(self) -> EngineLab:
        return EngineLab(
            self.built,
            self.adapters,
            max_num_batched_tokens=max(CHUNK, max(BATCHES) * CONTEXT),
            max_loras=NUM_ADAPTERS,
            enable_prefix_cache=False,
        )


def main(argv: list[str] | None = None) -> int:
    """Print one table: what each costs, over the base, and the bytes of its layers."""
    parser = make_parser(__doc__)
    parser.add_argument("--schemes", nargs="+", choices=QUANTIZATIONS, default=["int8"])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=2.5, help="begin no pass that ends later")
    parser.add_argument("--cpu-seconds", action="store_true")
    options = parser.parse_args(argv)
    clock = time.perf_counter_ns
    if options.cpu_seconds:
        torch.set_num_threads(1)
        clock = time.thread_time_ns
    started = time.monotonic()
    folder = model_dir(options)
    with tempfile.TemporaryDirectory() as scratch:
        adapters = write_adapters(folder, Path(scratch), adapter_names(NUM_ADAPTERS))
        contenders = [make_contender(folder, adapters, None)]
        contenders += [make_contender(folder, adapters, name) for name in options.schemes]
    longest = 0.0
    for number in range(options.passes + 1):  # the first is a warm-up
        began = time.monotonic()
        if number > 1 and began + longest - started > 60 * options.minutes:
            break
        for contender in contenders:
            gc.collect()
            contender.run_pass(clock, number)
        longest = max(longest, time.monotonic() - began)
    for contender in contenders:
        del contender.passes[0]
    print(machine())
    print(markdown(HEADER, table(contenders)))
    write_json(options.json, {c.name: {"bytes": c.layer_bytes, "ms": c.passes} for c in contenders})
    return 0


KINDS = (f"prefill {CHUNK}", *(f"decode {batch}" for batch in BATCHES))
HEADER = ("base", "MB of layers", *(f"{kind}, ms" for kind in KINDS), *KINDS)


def table(contenders: list[Contender]) -> list[list[str]]:
    """Medians, then ratios to the first with their extremes over passes."""
    base = contenders[0]
    rows: list[list[str]] = []
    for contender in contenders:
        medians = [statistics.median(one[kind] for one in contender.passes) for kind in KINDS]
        ratios = [
            [a[kind] / b[kind] for a, b in zip(contender.passes, base.passes, strict=True)]
            for kind in KINDS
        ]
        rows.append(
            [
                contender.name,
                f"{contender.layer_bytes / 1e6:.0f}",
                *(f"{value:.1f}" for value in medians),
                *(f"{statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f})" for r in ratios),
            ]
        )
    return rows


def make_contender(folder: Path, adapters: list[Path], quantization: str | None) -> Contender:
    """Load the model in bfloat16, quantised or not."""
    built = build_runner(
        folder,
        dtype=BASE,
        quantization=quantization,
        num_kv_blocks=1024,
        max_loras=NUM_ADAPTERS,
        self_test=False,
    )
    return Contender(
        quantization or BASE, built, read_adapters(built, adapters), layer_bytes(built)
    )


def layer_bytes(built: BuiltRunner) -> int:
    """Of all tensors that the layers' linears hold."""
    runner: Any = built.runner
    linears = [
        projection._linear for key, projection in runner.projections.items() if key.layer >= 0
    ]
    return sum(
        value.nbytes
        for linear in linears
        for value in vars(linear).values()
        if isinstance(value, torch.Tensor)
    )


def _timed(clock: Callable[[], int], run: Callable[[], object]) -> float:
    began = clock()
    run()
    return (clock() - began) / 1e6


if __name__ == "__main__":
    sys.exit(main())
