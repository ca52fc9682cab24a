"""LoRA on the CPU, beside the base model's GEMMs of the same layers in the same run.

    python benchmarks/cpu_lora.py [--threads N] [--cpu-kernels native --cpu-kernels torch] [--quick]

Every projection of every layer is run as in a forward pass, base then LoRA, each timed; layers are
many enough that weights come from memory. Variants take turns, pass by pass. The table gives, for a
layer, medians over passes, the quartiles of LoRA ÷ base, the bar it should stay under, and the
floor: the time that LoRA's bytes at the measured read bandwidth, or its FLOPs at the rate of the
faster of two GEMMs, would take alone. `--cpu-seconds` counts one thread's own time instead: for
machines that others use.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.ops import TorchOps
from engine.ops.torch_ops import TorchLinear
from engine.runner.padding import padded_rows
from lora_kernels import CpuKernels, LoraBatch, LoraSlice, add_lora, choose_cpu_kernels

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shapes:
    name: str
    hidden: int
    inner: int
    kv: int
    num_layers: int

    def projections(self) -> list[tuple[int, tuple[int, ...]]]:
        return [
            (self.hidden, (self.hidden, self.kv, self.kv)),
            (self.hidden, (self.hidden,)),
            (self.hidden, (self.inner, self.inner)),
            (self.inner, (self.hidden,)),
        ]


MODELS = [
    Shapes("SmolLM2-135M", 576, 1536, 192, 12),
    Shapes("Qwen2.5-0.5B", 896, 4864, 128, 4),
]


@dataclass(frozen=True)
class Case:
    name: str
    ranks: tuple[int, ...]
    """Of each registered adapter."""
    rows: tuple[int, ...]
    """Of each adapter."""
    bar: str = ""


CASES = [
    Case("1 row", (16,) * 8, (1,)),
    Case("8 rows, 8 adapters", (16,) * 8, (1,) * 8),
    Case("32 rows, 8 adapters", (16,) * 8, (4,) * 8, "22%"),
    Case("32 rows, 32 adapters", (16,) * 32, (1,) * 32),
    Case("64 rows, 64 adapters", (16,) * 64, (1,) * 64),
    Case("512 rows, 4 equal parts", (16,) * 4, (128,) * 4, "12%"),
    Case("512 rows, 300/120/60/32", (16,) * 4, (300, 120, 60, 32), "15%"),
    Case("2048 rows, 4 equal parts", (16,) * 4, (512,) * 4),
]
RANK_CASES = [
    Case("31 rows of rank 8", (8,) * 7 + (128,), (5, 5, 5, 4, 4, 4, 4, 0)),
    Case("1 row of rank 128", (8,) * 7 + (128,), (0, 0, 0, 0, 0, 0, 0, 1)),
    Case("both", (8,) * 7 + (128,), (5, 5, 5, 4, 4, 4, 4, 1), "1.15 x sum"),
    Case("31 of rank 8, no 128 there", (8,) * 7, (5, 5, 5, 4, 4, 4, 4)),
    Case("32 rows, 8 of 8 adapters", (16,) * 8, (4,) * 8),
    Case("32 rows, 8 of 64 adapters", (16,) * 64, (4,) * 8, "as 8 of 8"),
]


class Layers:
    """Base weights and slots of several layers, for one CPU path."""

    def __init__(self, shapes: Shapes, ranks: Sequence[int], kernels: CpuKernels) -> None:
        generator = torch.Generator().manual_seed(0)
        self.projections: list[tuple[TorchLinear, Any, int]] = []
        for _ in range(shapes.num_layers):
            for in_features, sizes in shapes.projections():
                weight = (
                    torch.randn(sum(sizes), in_features, generator=generator) / in_features**0.5
                )
                table: Any = kernels.make_table(in_features, sizes, len(ranks), DTYPE)
                for slot, rank in enumerate(ranks):
                    slices = [
                        LoraSlice(
                            torch.randn(rank, in_features, generator=generator),
                            torch.randn(size, rank, generator=generator) / 64,
                            1.0,
                        )
                        for size in sizes
                    ]
                    table.install(slot, kernels.fuse(slices, DTYPE))
                linear = TorchOps().make_linear(weight.to(DTYPE))
                self.projections.append((linear, table, in_features))

    def run(self, batch: LoraBatch, rows: int, clock: Callable[[], int]) -> tuple[int, int]:
        """Nanoseconds of all base GEMMs, and of LoRA."""
        inputs = {n: torch.randn(padded_rows(rows), n).to(DTYPE) for _, _, n in self.projections}
        base = lora = 0
        for linear, table, in_features in self.projections:
            x = inputs[in_features]
            start = clock()
            y = linear(x)
            between = clock()
            add_lora(y, x, table, batch)
            lora += clock() - between
            base += between - start
        return base, lora


@dataclass(frozen=True)
class Machine:
    bytes_per_second: float
    bf16_flops: float
    fp32_flops: float

    def floor_us(self, shapes: Shapes, case: Case) -> float:
        """A layer's bytes or FLOPs, whichever takes longer."""
        num_bytes = flops = 0.0
        for rank, rows in zip(case.ranks, case.rows, strict=False):
            for in_features, sizes in shapes.projections():
                a, b = len(sizes) * rank * in_features, rank * sum(sizes)
                num_bytes += 2 * (a + b) * (rows > 0) + rows * (2 * in_features + 4 * sum(sizes))
                flops += 2 * rows * (a + b)
        fastest = max(self.bf16_flops, self.fp32_flops)
        return 1e6 * max(num_bytes / self.bytes_per_second, flops / fastest)


def measure_machine(clock: Callable[[], int]) -> Machine:
    def best(work: Callable[[], object], amount: float) -> float:
        return amount / min(timed(work) for _ in range(7))

    def timed(work: Callable[[], object]) -> float:
        start = clock()
        work()
        return (clock() - start) / 1e9

    memory = torch.ones(2**27)
    square = torch.randn(1024, 1024)
    halves = square.to(DTYPE)
    return Machine(
        bytes_per_second=best(memory.sum, memory.nbytes),
        bf16_flops=best(lambda: halves @ halves, 2 * 1024**3),
        fp32_flops=best(lambda: square @ square, 2 * 1024**3),
    )


def measure(
    shapes: Shapes, cases: Sequence[Case], paths: Sequence[CpuKernels], passes: int, clock: Any
) -> Iterator[tuple[Case, CpuKernels, list[tuple[int, int]]]]:
    """Cases of one model take turns, so that what the machine does meanwhile hits all alike."""
    layers = {
        (path.name, case.ranks): Layers(shapes, case.ranks, path)
        for path in paths
        for case in {case.ranks: case for case in cases}.values()
    }
    batches = [LoraBatch.from_runs(range(len(case.rows)), case.rows) for case in cases]
    times: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for number in range(passes + 1):
        for case, batch in zip(cases, batches, strict=True):
            for path in paths:
                taken = layers[path.name, case.ranks].run(batch, sum(case.rows), clock)
                if number:
                    times.setdefault((case.name, path.name), []).append(taken)
    for case in cases:
        for path in paths:
            yield case, path, times[case.name, path.name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-kernels", action="append", help="native (default), native/avx2, torch"
    )
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="only the cases that have a bar")
    parser.add_argument("--cpu-seconds", action="store_true", help="one thread's own time")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.cpu_seconds else arguments.threads)
    clock = time.thread_time_ns if arguments.cpu_seconds else time.perf_counter_ns
    paths = [choose_cpu_kernels(name) for name in arguments.cpu_kernels or ["native"]]
    machine = measure_machine(clock)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, load {load}; reads "
        f"{machine.bytes_per_second / 1e9:.0f} GB/s, GEMM of 1024: bf16 "
        f"{machine.bf16_flops / 1e9:.0f}, fp32 {machine.fp32_flops / 1e9:.0f} GFLOP/s"
    )
    print(
        f"\n{'model':13} {'case':27} {'kernels':18} {'base us':>8} {'LoRA us':>8} "
        f"{'LoRA/base (quartiles)':>23} {'bar':>10} {'floor us':>9} {'floor':>6}"
    )
    cases = [case for case in CASES if case.bar or not arguments.quick]
    with torch.inference_mode():
        for shapes in MODELS:
            for group in (cases, RANK_CASES):
                for case, path, times in measure(shapes, group, paths, arguments.passes, clock):
                    print_row(shapes, case, path, times, machine)


def print_row(
    shapes: Shapes,
    case: Case,
    path: CpuKernels,
    times: Sequence[tuple[int, int]],
    machine: Machine,
) -> None:
    per_layer = 1e3 * shapes.num_layers
    base = statistics.median(base for base, _ in times) / per_layer
    lora = statistics.median(lora for _, lora in times) / per_layer
    low, middle, high = statistics.quantiles([lora / base for base, lora in times], n=4)
    floor = machine.floor_us(shapes, case)
    ratio = f"{middle:7.1%} ({low:.1%}-{high:.1%})"
    print(
        f"{shapes.name:13} {case.name:27} {path.name:18} {base:8.0f} {lora:8.0f} "
        f"{ratio:>23} {case.bar:>10} {floor:9.0f} {floor / base:6.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
