"""Compiles every Triton kernel, tile and dtype ahead of time and says what each costs; no GPU.

What is compiled is what `triton_launch.plan` would launch. A spill is a fault, and so is, where
pointers and strides are aligned, an access narrower than 16 bytes.
``python -m lora_kernels.compile_report`` prints the table for the Triton installed.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton
from torch import Tensor

from lora_kernels.ahead_of_time import MachineCode, compile_call
from lora_kernels.batch import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_table import DeviceLoraTable
from lora_kernels.kernel_call import KernelCall
from lora_kernels.tiles import ARCHITECTURES, VARIANTS, Variant
from lora_kernels.triton_launch import plan
from lora_kernels.weights import LoraSlice

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FULL_BYTES = 16
"""What a thread can move at once."""
MAX_SHARED_BYTES = 99 * 1024
"""What a block may use on every GPU from sm_80 on (the least: sm_86, sm_89, sm_120)."""


C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to compile."""

    variant: Variant
    dtype: str
    architecture: int
    split: bool = False
    """Whether the sum over inputs is split, as for small batches that need not be invariant."""
    aligned: bool = True
    """Whether sizes are multiples of 16, as every real model's are."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a compiled kernel uses; `shared_bytes` a block, registers a thread."""

    kernel: str
    tile: str
    dtype: str
    architecture: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    widths: Mapping[str, tuple[int, ...]]
    """Bytes of each access to a tile in global memory: by array, without repeats."""
    faults: tuple[str, ...]

    @property
    def row(self) -> str:
        """One line of the table."""
        widths = " ".join(f"{k}:{'/'.join(map(str, v))}" for k, v in self.widths.items())
        return (
            f"| {self.kernel} | {self.tile} | {self.dtype} | sm_{self.architecture} "
            f"| {self.registers} | {self.shared_bytes} | {self.spill_bytes} | {widths} |"
        )


HEADER = (
    "| kernel | tile | dtype | GPU | registers | shared bytes | spilled bytes | access bytes |\n"
    "|---|---|---|---|---:|---:|---:|---|"
)


def all_cases() -> list[Case]:
    """Every variant, dtype and architecture; split sums and odd sizes where they matter."""
    return [
        Case(variant, dtype, architecture, split, aligned)
        for variant in VARIANTS
        for dtype in DTYPES
        for architecture in ARCHITECTURES
        for split, aligned in ((False, True), (True, True), (False, False))
        if (not split or variant != "sgmv_64") and (aligned or dtype == "bf16")
    ]


def measure(case: Case) -> list[Cost]:
    """Compile a case's shrink and expand."""
    return [_measure(call, case) for call in _calls(case)]


def _calls(case: Case) -> list[KernelCall]:
    """The launches for a fused q/k/v."""
    dtype, rank = DTYPES[case.dtype], 16
    in_features, sizes = (4096, (512, 256, 256)) if case.aligned else (4095, (511, 255, 257))
    table = DeviceLoraTable.create(
        in_features, sizes, 1, max_rank=64, pool_rows=64, dtype=dtype, device="cpu"
    )
    a = torch.zeros(rank, in_features)
    table.install_slices(0, [LoraSlice(a, torch.zeros(size, rank), 1.0) for size in sizes])
    rows = 16 if case.split else 512
    batch = DeviceLoraBatch(
        rows, 1, max_slices=3, max_rank=64, dtype=dtype, device="cpu",
        batch_invariant=False, variant=case.variant, architecture=case.architecture,
    )  # fmt: skip
    batch.update(LoraBatch.from_runs([0], [rows]))
    y, x = torch.zeros(rows, sum(sizes), dtype=dtype), torch.zeros(rows, in_features, dtype=dtype)
    return plan(y, x, table, batch)


def _measure(call: KernelCall, case: Case) -> Cost:
    code = compile_call(call, case.architecture)
    return Cost(
        kernel=call.kernel.__name__.removesuffix("_kernel"),
        tile=_tile_name(call, case),
        dtype=case.dtype,
        architecture=case.architecture,
        registers=code.registers,
        shared_bytes=code.shared_bytes,
        spill_bytes=code.spill_bytes,
        widths=code.widths,
        faults=tuple(_faults(call, case, code)),
    )


def _faults(call: KernelCall, case: Case, code: MachineCode) -> Iterator[str]:
    if code.spill_bytes > 0:
        yield f"{code.spill_bytes} bytes are spilled"
    if code.shared_bytes > MAX_SHARED_BYTES:
        yield f"{code.shared_bytes} bytes of shared memory, over {MAX_SHARED_BYTES}"
    full_bytes = {name: _full_bytes(call, name) for name in _arrays(call)}
    for name in full_bytes.keys() - {access.name for access in code.accesses}:
        yield f"no access to {name} was found"
    for access in code.accesses:
        if case.aligned and access.num_bytes < full_bytes[access.name]:
            yield f"{access}: {full_bytes[access.name]} are possible"


def _arrays(call: KernelCall) -> tuple[str, ...]:
    return ("t", "x", "a") if "BLOCK_K" in call.constants else ("y", "t", "b")


def _full_bytes(call: KernelCall, name: str) -> int:
    """Widest access to a tile: 16 bytes, less where the tile has fewer for each thread."""
    block_m, block_r = call.constants.get("BLOCK_M", 1), call.constants["BLOCK_R"]
    columns = call.constants.get("BLOCK_K") or call.constants["BLOCK_N"]
    elements = {
        "t": block_m * block_r,
        "x": block_m * columns,
        "y": block_m * columns,
        "a": block_r * columns,
        "b": block_r * columns,
    }[name]
    operand = "t_ptr" if name == "t" else "x_ptr" if "x_ptr" in call.arguments else "y_ptr"
    tensor = call.arguments[operand]
    assert isinstance(tensor, Tensor)
    element_bytes = tensor.element_size()
    per_thread = elements * element_bytes // (32 * call.num_warps)
    return max(element_bytes, min(FULL_BYTES, per_thread))


def _tile_name(call: KernelCall, case: Case) -> str:
    tile = call.constants
    rows = tile.get("BLOCK_M", 1)
    columns = tile.get("BLOCK_K") or tile.get("BLOCK_N")
    split = f" split {tile['SPLIT_K']}" if tile["SPLIT_K"] > 1 else ""
    odd = "" if case.aligned else " odd sizes"
    return f"{rows}x{tile['BLOCK_R']}x{columns} w{call.num_warps} s{call.num_stages}{split}{odd}"


def compile_all(cases: Sequence[C], measure: Callable[[C], list[Cost]]) -> list[Cost]:
    """Compile in two processes; in the order of the cases."""
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(2, initializer=_use_cache, initargs=(cache,)) as pool,
    ):
        return [cost for costs in pool.map(measure, cases) for cost in costs]


def _use_cache(folder: str) -> None:
    # Compile afresh: a cached kernel keeps the line numbers of the file as it was.
    os.environ["TRITON_CACHE_DIR"] = folder


def tell(costs: Sequence[Cost]) -> int:
    """Print the table; 1 if a kernel has a fault."""
    sys.stdout.write(f"triton {triton.__version__}\n{HEADER}\n")
    sys.stdout.writelines(f"{cost.row}\n" for cost in costs)
    faults = [f"{cost.row}: {fault}" for cost in costs for fault in cost.faults]
    sys.stdout.writelines(f"FAULT {fault}\n" for fault in faults)
    sys.stdout.write(f"{len(costs)} kernels, {len(faults)} faults\n\n")
    return 1 if faults else 0


def main() -> int:
    """Report on the LoRA kernels."""
    return tell(compile_all(all_cases(), measure))


if __name__ == "__main__":
    sys.exit(main())
