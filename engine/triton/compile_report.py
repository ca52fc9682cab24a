"""Compiles the engine's Triton kernels ahead of time and says what each costs; no GPU is needed.

What is compiled is what the engine would launch. Faults are a spill, more shared memory than a
block may have, and an access narrower than 16 bytes (8 to 8-bit keys and values) where a tile has
so many for each thread. ``python -m engine.triton.compile_report [ARCHITECTURE...]`` prints the
table for the Triton installed.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.triton.compile_cases import ARCHITECTURES, Case, all_cases
from lora_kernels.ahead_of_time import MachineCode, compile_call
from lora_kernels.compile_report import FULL_BYTES, Cost, compile_all, tell
from lora_kernels.kernel_call import KernelCall

MAX_SHARED_BYTES: Mapping[int, int] = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What a block may use on every GPU that a table of tiles is for; sm_86, sm_89 and sm_120 have the
table of sm_80."""


@dataclass(frozen=True, slots=True)
class Work:
    """A case on one architecture."""

    case: Case
    architecture: int


def measure(work: Work) -> list[Cost]:
    """Compile the launches of a case."""
    return [_measure(call, work) for call in work.case.calls(work.architecture)]


def _measure(call: KernelCall, work: Work) -> Cost:
    code = compile_call(call, work.architecture)
    return Cost(
        kernel=call.kernel.__name__.removesuffix("_kernel"),
        tile=f"{work.case.name}, {_tile_name(call)}",
        dtype=work.case.dtype,
        architecture=work.architecture,
        registers=code.registers,
        shared_bytes=code.shared_bytes,
        spill_bytes=code.spill_bytes,
        widths=code.widths,
        faults=tuple(_faults(call, work, code)),
    )


def _faults(call: KernelCall, work: Work, code: MachineCode) -> Iterator[str]:
    most = MAX_SHARED_BYTES[work.architecture]
    if code.spill_bytes > 0:
        yield f"{code.spill_bytes} bytes are spilled"
    if code.shared_bytes > most:
        yield f"{code.shared_bytes} bytes of shared memory, over {most}"
    axes = _TILE_AXES.get(call.kernel.__name__.removesuffix("_kernel"), {})
    if axes and not code.accesses:
        yield "no access to a tile was found"
    for access in code.accesses:
        full = _full_bytes(call, access.name, axes[access.name])
        if access.num_bytes < full:
            yield f"{access}: {full} are possible"


def _full_bytes(call: KernelCall, name: str, axes: tuple[str, ...]) -> int:
    """Widest access to a tile: 16 bytes, less where the tile has fewer for each thread."""
    constants = call.constants
    pointers = (f"{name}_ptr", *_POINTERS.get(name, ()))
    tensor = next(call.arguments[p] for p in pointers if p in call.arguments)
    assert not isinstance(tensor, int | float)
    per_thread = (
        math.prod(int(constants[axis]) for axis in axes)
        * tensor.element_size()
        // (32 * call.num_warps)
    )
    widest = FULL_BYTES if tensor.element_size() > 1 else FULL_BYTES // 2
    return max(tensor.element_size(), min(widest, per_thread))


_POINTERS: Mapping[str, tuple[str, ...]] = {
    "u": ("update_ptr",), "w": ("weight_ptr",), "gate": ("x_ptr",), "up": ("x_ptr",),
    "new": ("x_ptr", "key_ptr"), "kv": ("v_ptr",), "rest": ("x_ptr",), "weight": ("q_weight_ptr",),
}  # fmt: skip
"""Arguments whose name is not the array's."""
_ATTENTION = {
    "q": ("BLOCK_M", "BLOCK_D"), "out": ("BLOCK_M", "BLOCK_D"),
    "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_D"),
}  # fmt: skip
_ROTATED = ("BLOCK_H", "BLOCK_HALF")
_TILE_AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "paged_attention": _ATTENTION,
    "combine_splits": {"part": ("NUM_SPLITS", "BLOCK_D"), "out": ("BLOCK_D",)},
    "rms_norm": dict.fromkeys(("x", "u", "w", "out"), ("BLOCK",)),
    "gated_activation": dict.fromkeys(("gate", "up", "out"), ("BLOCK",)),
    "rotate_and_store": {
        "x": _ROTATED, "k": _ROTATED, "rest": ("BLOCK_H", "BLOCK_REST"),
        "cos": ("BLOCK_HALF",), "sin": ("BLOCK_HALF",), "weight": ("BLOCK_REST",),
        "new": ("BLOCK_H", "BLOCK_D"), "kv": ("BLOCK_H", "BLOCK_D"),
    },
    "store_kv": dict.fromkeys(("new", "kv"), ("BLOCK_H", "BLOCK_D")),
    "score": {"logits": ("BLOCK",), "scores": ("BLOCK",)},
    "limit": {"scores": ("BLOCK",)},
    "race": {"logits": ("BLOCK",), "scores": ("BLOCK",)},
    "best": {"logits": ("BLOCK",)},
}  # fmt: skip
"""Whose product is the elements of a tile."""


def _tile_name(call: KernelCall) -> str:
    sizes = [str(call.constants[axis]) for axis in _NAMED if axis in call.constants]
    return f"{'x'.join(sizes)} w{call.num_warps} s{call.num_stages}"


_NAMED = ("BLOCK_M", "BLOCK_N", "BLOCK_H", "BLOCK_D", "BLOCK", "NUM_SPLITS", "TOP")


def main(architectures: tuple[int, ...] = ARCHITECTURES) -> int:
    """Report on the engine's kernels."""
    work = [Work(case, architecture) for case in all_cases() for architecture in architectures]
    return tell(compile_all(work, measure))


if __name__ == "__main__":
    sys.exit(main(tuple(map(int, sys.argv[1:])) or ARCHITECTURES))
