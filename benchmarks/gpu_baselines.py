"""What one would write without a LoRA kernel; each adds the same update to y, in place.

All get their weights stacked and their indices on the device beforehand, for free; moving rows
into the shape that an operation wants is part of it.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.gpu_cases import Workload, segments


def addmm_loop(work: Workload, y: Tensor) -> Callable[[], None]:
    """A shrink and an `addmm` for each adapter and slice."""
    columns = _columns(work)
    steps = [
        (work.x[first:last], part.a.T, y[first:last, left:right], part.b.T, part.scaling)
        for adapter, first, last in segments(work.case)
        for part, (left, right) in zip(work.adapters[adapter], columns, strict=True)
    ]

    def run() -> None:
        for rows, a, out, b, scaling in steps:
            torch.addmm(out, rows @ a, b, alpha=scaling, out=out)

    return run


def padded_bmm(work: Workload, y: Tensor) -> Callable[[], None]:
    """Rows padded to the longest segment, ranks to the largest, then two `bmm` a slice."""
    parts = segments(work.case)
    longest = max(last - first for _, first, last in parts)
    # Row of the padded batch that each row of x goes to.
    places = torch.cat(
        [
            torch.arange(last - first) + index * longest
            for index, (_, first, last) in enumerate(parts)
        ]
    ).to(work.x.device)
    padded = work.x.new_zeros(len(parts) * longest, work.case.in_features)
    stacks = _stacks(work, y)

    def run() -> None:
        padded.index_copy_(0, places, work.x)
        rows = padded.view(len(parts), longest, -1)
        for a, b, out in stacks:
            update = torch.bmm(torch.bmm(rows, a), b)
            out.add_(update.view(len(parts) * longest, -1).index_select(0, places))

    return run


def grouped_mm(work: Workload, y: Tensor) -> Callable[[], None]:
    """Ranks padded to the largest, then two `torch._grouped_mm` a slice."""
    ends = [last for _, _, last in segments(work.case)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=work.x.device)
    stacks = _stacks(work, y)

    def run() -> None:
        for a, b, out in stacks:
            shrunk = torch._grouped_mm(work.x, a, offs=offsets)
            out.add_(torch._grouped_mm(shrunk, b, offs=offsets))

    return run


Baseline = Callable[[Workload, Tensor], Callable[[], None]]
"""Makes, for a workload and its y, the function to time."""

BASELINES: dict[str, Baseline] = {
    "addmm loop": addmm_loop,
    "padded bmm": padded_bmm,
    "grouped_mm": grouped_mm,
}


def _columns(work: Workload) -> list[tuple[int, int]]:
    return list(pairwise(work.table.slice_indptr))


def _stacks(work: Workload, y: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each slice [live, in, rank], [live, rank, out] with the scaling in it, and y's columns.

    Both are views of [live, rank, in] and [live, out, rank], the layout that checkpoints have.
    """
    live = [adapter for adapter, _, _ in segments(work.case)]
    rank = max(work.case.ranks[adapter] for adapter in live)
    stacks: list[tuple[Tensor, Tensor, Tensor]] = []
    for index, (left, right) in enumerate(_columns(work)):
        a = work.x.new_zeros(len(live), rank, work.case.in_features)
        b = work.x.new_zeros(len(live), right - left, rank)
        for place, adapter in enumerate(live):
            part = work.adapters[adapter][index]
            a[place, : part.rank] = part.a
            b[place, :, : part.rank] = part.b * part.scaling
        stacks.append((a.transpose(1, 2), b.transpose(1, 2), y[:, left:right]))
    return stacks
