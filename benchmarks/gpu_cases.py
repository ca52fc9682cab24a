"""What `gpu_kernels.py` times: batches, their tensors, and the least time that they can take."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lora_kernels import LoraBatch, LoraSlice
from lora_kernels.device_table import DeviceLoraTable

IN_FEATURES = 4096
SLICE_SIZES = (4096, 1024, 1024)
RANKS = (8, 16, 32, 64, 128)
ADAPTERS = (1, 8, 64)
ROWS = (1, 8, 64, 512, 4096)
MAX_RANK = 128


@dataclass(frozen=True, slots=True)
class Case:
    """Adapters of some ranks with some rows each, on one fused projection."""

    name: str
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    in_features: int = IN_FEATURES
    slice_sizes: tuple[int, ...] = SLICE_SIZES

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @property
    def num_adapters(self) -> int:
        """Those that have rows."""
        return sum(length > 0 for length in self.lengths)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a kernel must do at least."""

    num_bytes: int
    """Each operand moved once."""
    flops: int
    """By true rank."""

    def microseconds(self, rates: "Rates") -> float:
        """With bytes and operations overlapped."""
        seconds = max(self.num_bytes / rates.bytes_per_second, self.flops / rates.flops_per_second)
        return seconds * 1e6


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reached on a large copy and a large GEMM, just before."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Workload:
    """A case's tensors."""

    case: Case
    x: Tensor
    y: Tensor
    adapters: tuple[tuple[LoraSlice, ...], ...]
    table: DeviceLoraTable
    batch: LoraBatch


def all_cases() -> list[Case]:
    """Uniform batches of each size, then those whose ranks or rows differ."""
    cases = [
        Case("uniform", (rank,) * adapters, (rows // adapters,) * adapters)
        for rank in RANKS
        for adapters in ADAPTERS
        for rows in ROWS
        if rows >= adapters
    ]
    return [
        *cases,
        Case("zipf", (16,) * 8, (188, 94, 63, 47, 38, 31, 27, 24)),
        Case("8 alone", (8, 128), (31, 0)),
        Case("128 alone", (8, 128), (0, 1)),
        Case("8 and 128", (8, 128), (31, 1)),
        Case("56 idle", (16,) * 64, (4,) * 8 + (0,) * 56),
    ]


def shrink_cost(case: Case, element_bytes: int) -> Cost:
    """``t = x @ A.T``: reads x and the live A, writes t in float32."""
    num_slices = len(case.slice_sizes)
    live_ranks = sum(rank for rank, length in zip(case.ranks, case.lengths, strict=True) if length)
    row_ranks = sum(rank * length for rank, length in zip(case.ranks, case.lengths, strict=True))
    weights = num_slices * live_ranks * case.in_features
    rows = case.num_rows * case.in_features
    return Cost(
        num_bytes=element_bytes * (weights + rows) + 4 * num_slices * row_ranks,
        flops=2 * num_slices * row_ranks * case.in_features,
    )


def expand_cost(case: Case, element_bytes: int) -> Cost:
    """``y += t @ B.T``: reads t in float32 and the live B, reads and writes y."""
    num_slices, out = len(case.slice_sizes), sum(case.slice_sizes)
    live_ranks = sum(rank for rank, length in zip(case.ranks, case.lengths, strict=True) if length)
    row_ranks = sum(rank * length for rank, length in zip(case.ranks, case.lengths, strict=True))
    return Cost(
        num_bytes=element_bytes * (live_ranks * out + 2 * case.num_rows * out)
        + 4 * num_slices * row_ranks,
        flops=2 * row_ranks * out,
    )


def make_workload(
    case: Case, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> Workload:
    """Random tensors; rows of an adapter are adjacent, which only the baselines need."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, scale: float) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device) * scale
        return values.to(dtype)

    adapters = tuple(
        tuple(
            LoraSlice(
                random(rank, case.in_features, scale=case.in_features**-0.5),
                random(size, rank, scale=rank**-0.5),
                0.5 + index / 4,
            )
            for index, size in enumerate(case.slice_sizes)
        )
        for rank in case.ranks
    )
    table = DeviceLoraTable.create(
        case.in_features,
        case.slice_sizes,
        len(case.ranks),
        max_rank=max(MAX_RANK, *case.ranks),
        pool_rows=sum(-(-rank // 8) * 8 for rank in case.ranks),
        dtype=dtype,
        device=device,
    )
    for slot, slices in enumerate(adapters):
        table.install_slices(slot, slices)
    return Workload(
        case=case,
        x=random(case.num_rows, case.in_features, scale=1.0),
        y=random(case.num_rows, sum(case.slice_sizes), scale=1.0),
        adapters=adapters,
        table=table,
        batch=LoraBatch.from_runs(range(len(case.ranks)), case.lengths),
    )


def segments(case: Case) -> list[tuple[int, int, int]]:
    """(adapter, first row, row past the last) of each adapter that has rows."""
    ends = list(accumulate(case.lengths))
    return [
        (index, end - length, end)
        for index, (length, end) in enumerate(zip(case.lengths, ends, strict=True))
        if length
    ]
