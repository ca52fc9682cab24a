"""Random LoRA weights, tables and batches; every kernel family is tested on the same ones."""

import shutil
from collections.abc import Sequence
from typing import Any

import torch

from lora_kernels import CpuKernels, LoraBatch, LoraSlice, LoraTable, LoraWeights
from lora_kernels.cpu_kernels import CpuTable
from lora_kernels.errors import KernelUnavailable
from lora_kernels.native_library import load_native_library
from lora_kernels.table import SlotTable

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
"""Largest difference from the reference, relative to the largest output."""

POPULARITY = {
    "AABA": [0, 0, 1, 0],
    "ABAB": [0, 1, 0, 1],
    "none": [None, None, None, None],
    "mixed": [None, 2, 0, None, 2, 1],
    "identical": [1, 1, 1],
    "distinct": [2, 0, 1],
}


def make_slice(
    out: int, in_features: int, rank: int, generator: torch.Generator, scaling: float = 1.0
) -> LoraSlice:
    return LoraSlice(
        a=torch.randn(rank, in_features, generator=generator) / in_features**0.5,
        b=torch.randn(out, rank, generator=generator) / max(rank, 1) ** 0.5,
        scaling=scaling,
    )


def make_table(
    in_features: int,
    slice_sizes: Sequence[int],
    ranks: Sequence[Sequence[int | None]],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LoraTable:
    """`ranks[slot][slice]`: None where the adapter has no weights for that slice."""
    table = LoraTable(in_features, slice_sizes, len(ranks))
    for slot, slices in enumerate(make_adapters(in_features, slice_sizes, ranks, seed)):
        has_weights = any(part is not None for part in slices)
        table.install(slot, LoraWeights.fuse(slices, dtype) if has_weights else None)
    return table


def make_cpu_table(
    kernels: CpuKernels,
    in_features: int,
    slice_sizes: Sequence[int],
    ranks: Sequence[Sequence[int | None]],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> CpuTable:
    """`make_table` with the same values for any of the CPU's paths."""
    table: Any = kernels.make_table(in_features, slice_sizes, len(ranks), dtype)
    for slot, slices in enumerate(make_adapters(in_features, slice_sizes, ranks, seed)):
        if any(part is not None for part in slices):
            table.install(slot, kernels.fuse(slices, dtype))
    return table


def make_adapters(
    in_features: int,
    slice_sizes: Sequence[int],
    ranks: Sequence[Sequence[int | None]],
    seed: int = 0,
) -> list[list[LoraSlice | None]]:
    """For each slot its slices."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            None
            if rank is None
            else make_slice(size, in_features, rank, generator, 0.5 + slot + 0.3 * index)
            for index, (size, rank) in enumerate(zip(slice_sizes, slot_ranks, strict=True))
        ]
        for slot, slot_ranks in enumerate(ranks)
    ]


def make_rows(
    table: SlotTable[Any], batch: LoraBatch, dtype: torch.dtype, *, padding: int = 0, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random y and x for a batch, with `padding` rows below."""
    generator = torch.Generator().manual_seed(seed)
    rows = batch.num_rows + padding
    y = torch.randn(rows, table.out_features, generator=generator).to(dtype)
    x = torch.randn(rows, table.in_features, generator=generator).to(dtype)
    return y, x


def has_native_kernel() -> bool:
    """Whether the compiled kernel is there. Without one, there must be no compiler either: an
    install that should have built it and did not is a fault, not a reason to test less."""
    try:
        load_native_library()
    except KernelUnavailable:
        if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            raise
        return False
    return True
