"""The CPU path: one shrink and one expand a slice for each segment, in float32 GEMMs."""

import torch
from torch import Tensor

from lora_kernels.batch import LoraBatch
from lora_kernels.table import LoraTable
from lora_kernels.weights import LoraWeights

ROW_TILE = 16
"""GEMM rows come in multiples of this: then a row's bits do not depend on how many there are."""


def add_lora_cpu(y: Tensor, x: Tensor, table: LoraTable, batch: LoraBatch) -> None:
    """Do what `lora_kernels.add_lora` does; bit-equal for a row whatever its neighbours are."""
    for segment, slot in enumerate(batch.segment_slot):
        weights = table.weights(slot)
        begin, end = batch.segment_indptr[segment : segment + 2]
        if weights is None or begin == end:
            continue
        first = batch.segment_start[segment]
        if first is not None:
            _add_consecutive(y, x, first, end - begin, table, weights)
        else:
            _add_scattered(y, x, batch.permutation[begin:end], table, weights)


def _add_consecutive(
    y: Tensor, x: Tensor, first: int, num_rows: int, table: LoraTable, weights: LoraWeights
) -> None:
    padded = _round_up(num_rows)
    if x.shape[0] >= padded:
        # Rows of a GEMM are independent, so neighbours serve as padding; no copy is needed.
        start = min(first, x.shape[0] - padded)
        offset, inputs = first - start, x[start : start + padded].float()
    else:
        offset, inputs = 0, _padded_copy(x[first : first + num_rows])
    shrunk = _shrink(inputs, weights)
    for index, b in enumerate(weights.b):
        if b is None:
            continue
        update = _expand(shrunk, b, weights, index)[offset : offset + num_rows]
        left, right = table.slice_indptr[index : index + 2]
        y[first : first + num_rows, left:right].add_(update)


def _add_scattered(
    y: Tensor, x: Tensor, rows: Tensor, table: LoraTable, weights: LoraWeights
) -> None:
    shrunk = _shrink(_padded_copy(x.index_select(0, rows)), weights)
    for index, b in enumerate(weights.b):
        if b is None:
            continue
        update = _expand(shrunk, b, weights, index)[: rows.shape[0]]
        left, right = table.slice_indptr[index : index + 2]
        columns = y[:, left:right]
        columns.index_copy_(0, rows, columns.index_select(0, rows).add_(update))


def _shrink(inputs: Tensor, weights: LoraWeights) -> Tensor:
    """[rows, total_rank] float32, scaled."""
    return torch.mm(inputs, weights.a.T).mul_(weights.row_scaling)


def _expand(shrunk: Tensor, b: Tensor, weights: LoraWeights, index: int) -> Tensor:
    """[rows, slice] float32."""
    start, stop = weights.rank_indptr[index : index + 2]
    return torch.mm(shrunk[:, start:stop], b.T)


def _padded_copy(rows: Tensor) -> Tensor:
    """[num_rows, in] in any dtype -> [a multiple of ROW_TILE, in] float32, zeros below."""
    padded = torch.zeros(_round_up(rows.shape[0]), rows.shape[1], dtype=torch.float32)
    padded[: rows.shape[0]] = rows
    return padded


def _round_up(num_rows: int) -> int:
    return -(-num_rows // ROW_TILE) * ROW_TILE
