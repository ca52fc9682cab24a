"""Check the Triton kernels on a CUDA device, then time them; about three minutes.

    python benchmarks/gpu_kernels.py

Needs torch >= 2.11, triton >= 3.6 and NumPy, and no installation of Loraplex. Nothing is timed
unless every value is right. First come the engine's own kernels, for two models' sizes; then LoRA,
where one projection is a fused q/k/v of a 4096-wide model in bfloat16 and `rows` are rows of the
step, all adapters together. Times are medians in microseconds with a cold L2; a floor is bytes or
operations, each at the rate that this device reached just before.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_engine_kernels
from benchmarks.gpu_baselines import BASELINES, Baseline
from benchmarks.gpu_cases import (
    Case,
    Rates,
    Workload,
    all_cases,
    expand_cost,
    make_workload,
    segments,
    shrink_cost,
)
from lora_kernels.batch import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.kernel_call import is_interpreted
from lora_kernels.ops import add_lora
from lora_kernels.tiles import VARIANTS, Variant
from lora_kernels.triton_launch import plan

TIME_LIMIT_SECONDS = 170.0
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference from float64, relative to the largest output."""

COLUMNS = (
    "batch", "rank", "adapters", "rows", "variant", "shrink", "x floor", "expand", "x floor",
    "both", "floor", "invariant", *BASELINES, "empty",
)  # fmt: skip

CHECKS = (
    Case("even", (8, 16, 128), (1, 17, 3), 1024, (512, 256, 256)),
    Case("distinct", (16,) * 8, (1,) * 8, 2048, (1024, 128)),
    Case("odd", (1, 3, 24, 40), (2, 0, 130, 1), 1031, (259, 1, 77)),
)


def main() -> int:
    """Print the table; 1 if a value is wrong, 2 if the device cannot be used."""
    if not torch.cuda.is_available():
        sys.stderr.write("gpu_kernels: there is no CUDA device here\n")
        return 2
    if is_interpreted():
        sys.stderr.write(
            "gpu_kernels: unset TRITON_INTERPRET, which keeps kernels off the device\n"
        )
        return 2
    started = time.monotonic()
    baselines, missing = usable_baselines("cuda")
    wrong = list(wrong_values("cuda", baselines))
    wrong += gpu_engine_kernels.wrong_values("cuda")
    wrong += [] if replay_follows_the_batch() else ["a replayed CUDA graph"]
    sys.stderr.writelines(f"WRONG {name}\n" for name in wrong)
    if wrong:
        return 1
    from benchmarks.gpu_timing import Stopwatch, empty_kernel

    watch = Stopwatch()
    rates = watch.rates()
    empty = watch.microseconds(lambda: empty_kernel[1,]())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; all values are right")
    for name, reason in missing.items():
        print(f"no {name}: {reason}")
    print(
        f"{rates.bytes_per_second / 1e12:.2f} TB/s, {rates.flops_per_second / 1e12:.0f} TFLOP/s\n"
    )
    print_header(gpu_engine_kernels.COLUMNS)
    for row in gpu_engine_kernels.measured(watch.microseconds, rates):
        print(f"| {' | '.join(row)} |", flush=True)
    print()
    print_header(COLUMNS)
    left_out = 0
    for case in all_cases():
        if time.monotonic() - started > TIME_LIMIT_SECONDS:
            left_out += 1
        else:
            row = measure(case, watch.microseconds, rates, empty, baselines)
            print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{time.monotonic() - started:.0f} s; {left_out} batches left out for lack of time")
    return 0


def print_header(columns: Sequence[str]) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def measure(
    case: Case,
    microseconds: Callable[[Callable[[], None]], float],
    rates: Rates,
    empty: float,
    baselines: dict[str, Baseline],
    device: str = "cuda",
    architecture: int | None = None,
) -> list[str]:
    """One row of the table; `microseconds` times a function."""
    work = make_workload(case, dtype=torch.bfloat16, device=device)
    y = work.y.clone()
    batch = prepared(work, architecture=architecture)
    shrink, expand = plan(y, work.x, work.table, batch)
    shrink_floor = shrink_cost(case, 2).microseconds(rates)
    expand_floor = expand_cost(case, 2).microseconds(rates)
    shrink_time, expand_time = microseconds(shrink.run), microseconds(expand.run)
    both = microseconds(lambda: add_lora(y, work.x, work.table, batch))
    fixed = prepared(work, batch_invariant=True, architecture=architecture)
    invariant = microseconds(lambda: add_lora(y, work.x, work.table, fixed))
    others = [
        f"{microseconds(baselines[name](work, y)):.1f}" if name in baselines else "-"
        for name in BASELINES
    ]
    ranks = sorted({rank for rank, length in zip(case.ranks, case.lengths, strict=True) if length})
    return [
        case.name,
        "+".join(map(str, ranks)),
        str(case.num_adapters),
        str(case.num_rows),
        batch.variant,
        f"{shrink_time:.1f}",
        f"{shrink_time / shrink_floor:.1f}",
        f"{expand_time:.1f}",
        f"{expand_time / expand_floor:.1f}",
        f"{both:.1f}",
        f"{shrink_floor + expand_floor:.1f}",
        f"{invariant:.1f}",
        *others,
        f"{empty:.1f}",
    ]


def usable_baselines(device: str) -> tuple[dict[str, Baseline], dict[str, str]]:
    """Those that this PyTorch can run on this device, and why it cannot run the others."""
    usable: dict[str, Baseline] = {}
    missing: dict[str, str] = {}
    for name, make in BASELINES.items():
        work = make_workload(CHECKS[0], dtype=torch.bfloat16, device=device)
        try:
            make(work, work.y)()
        except RuntimeError as error:
            missing[name] = str(error).splitlines()[0]
        else:
            usable[name] = make
    return usable, missing


def wrong_values(
    device: str, baselines: dict[str, Baseline], architecture: int | None = None
) -> Iterator[str]:
    """Names of what differs from float64 by more than rounding does."""
    for dtype in TOLERANCE:
        for case in CHECKS:
            work = make_workload(case, dtype=dtype, device=device)
            expected = exact(work)
            for variant in (None, *VARIANTS):
                batch = prepared(work, variant=variant, architecture=architecture)
                batch.shrunk.fill_(float("nan"))
                got = work.y.clone()
                add_lora(got, work.x, work.table, batch)
                if not is_close(got, expected, dtype):
                    yield f"{variant or 'picked variant'}, {dtype}, {case.name}"
            if not is_batch_invariant(work, architecture):
                yield f"bits that depend on the batch, {dtype}, {case.name}"
    work = make_workload(CHECKS[0], dtype=torch.bfloat16, device=device)
    for name, make in baselines.items():
        got = work.y.clone()
        make(work, got)()
        if not is_close(got, exact(work), torch.bfloat16):
            yield f"the baseline {name}"


def is_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Not where anything is NaN."""
    scale = max(expected.abs().max().item(), 1.0)
    return bool((got.double() - expected).abs().max().item() <= TOLERANCE[dtype] * scale)


def is_batch_invariant(work: Workload, architecture: int | None = None) -> bool:
    """Whether each segment's first row has the bits that it has alone."""
    together = work.y.clone()
    batch = prepared(work, batch_invariant=True, architecture=architecture)
    add_lora(together, work.x, work.table, batch)
    for slot, first, _ in segments(work.case):
        alone = work.y[first : first + 1].clone()
        batch.update(LoraBatch.from_runs([slot], [1]))
        add_lora(alone, work.x[first : first + 1], work.table, batch)
        if not torch.equal(alone[0], together[first]):
            return False
    return True


def replay_follows_the_batch() -> bool:
    """Whether a captured graph of each variant serves the batch of a later step."""
    for variant in VARIANTS:
        work = make_workload(CHECKS[0], dtype=torch.bfloat16, device="cuda")
        batch = prepared(work, variant=variant)
        y = work.y.clone()
        add_lora(y, work.x, work.table, batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add_lora(y, work.x, work.table, batch)
        later = Case("later", CHECKS[0].ranks, (2, 0, 5), 1024, (512, 256, 256))
        batch.update(LoraBatch.from_runs(range(3), later.lengths))
        y.copy_(work.y)
        graph.replay()
        rows = later.num_rows
        expected = work.y.double()
        expected[:rows] = exact(
            Workload(later, work.x[:rows], work.y[:rows], work.adapters, work.table, work.batch)
        )
        if not is_close(y, expected, torch.bfloat16):
            return False
    return True


def exact(work: Workload) -> Tensor:
    """y after the update, in float64."""
    y = work.y.double()
    indptr = work.table.slice_indptr
    for adapter, first, last in segments(work.case):
        for index, part in enumerate(work.adapters[adapter]):
            shrunk = work.x[first:last].double() @ part.a.double().T
            update = part.scaling * (shrunk @ part.b.double().T)
            y[first:last, indptr[index] : indptr[index + 1]] += update
    return y


def prepared(
    work: Workload,
    *,
    batch_invariant: bool = False,
    variant: Variant | None = None,
    architecture: int | None = None,
) -> DeviceLoraBatch:
    """The workload's rows on its device."""
    batch = DeviceLoraBatch(
        max(work.case.num_rows, 1),
        len(work.case.ranks),
        max_slices=len(work.case.slice_sizes),
        max_rank=work.table.max_rank,
        dtype=work.x.dtype,
        device=work.table.device,
        batch_invariant=batch_invariant,
        variant=variant,
        architecture=architecture,
    )
    batch.update(work.batch)
    return batch


if __name__ == "__main__":
    sys.exit(main())
