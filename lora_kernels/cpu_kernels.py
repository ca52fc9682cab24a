"""The CPU paths, and the choice between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lora_kernels.cpu_native import NativeLoraTable
from lora_kernels.errors import KernelUnavailable
from lora_kernels.native_library import load_native_library
from lora_kernels.packed import PackedWeights
from lora_kernels.table import LoraTable
from lora_kernels.weights import LoraSlice, LoraWeights

CpuTable = LoraTable | NativeLoraTable
CpuWeights = LoraWeights | PackedWeights


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """One CPU path. Its tables take only weights that it fused itself."""

    name: str
    """`torch`, or `native` and the instruction set, such as `native/avx2`."""
    make_table: Callable[[int, Sequence[int], int, torch.dtype], CpuTable]
    """(in_features, slice_sizes, num_slots, dtype) -> a table of empty slots."""
    fuse: Callable[[Sequence[LoraSlice | None], torch.dtype], CpuWeights]
    """Fuse the slices of one adapter and projection, at least one present, rounded to the dtype.

    Raises ValueError if shapes do not agree. Safe on any thread.
    """
    fallback_reason: str | None = None
    """Why `auto` did not choose the compiled path."""


TORCH_KERNELS = CpuKernels(
    "torch",
    lambda in_features, slice_sizes, num_slots, _: LoraTable(in_features, slice_sizes, num_slots),
    LoraWeights.fuse,
)
"""Works wherever PyTorch does."""


def choose_cpu_kernels(choice: str = "auto") -> CpuKernels:
    """Pick a path: `torch`, `native`, `native/<instruction set>`, or `auto`.

    `auto` is the best compiled one, else `torch`. Raises KernelUnavailable if the path that was
    asked for by name cannot run on this machine, ValueError for an unknown name.
    """
    family, _, instruction_set = choice.partition("/")
    if choice == "torch":
        return TORCH_KERNELS
    if family != "native" and choice != "auto":
        raise ValueError(f"no CPU path is called {choice!r}: it is auto, native or torch")
    try:
        library = load_native_library()
    except KernelUnavailable as error:
        if choice == "auto":
            return CpuKernels(
                TORCH_KERNELS.name, TORCH_KERNELS.make_table, TORCH_KERNELS.fuse, str(error)
            )
        raise
    name = instruction_set or list(library.instruction_sets)[-1]
    if name not in library.instruction_sets:
        raise KernelUnavailable(
            f"it has no code for {name!r} that this machine can run; "
            f"it has {', '.join(library.instruction_sets)}"
        )
    return CpuKernels(f"native/{name}", partial(NativeLoraTable, library, name), PackedWeights.pack)
