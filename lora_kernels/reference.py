"""The reference that every other path is tested against: float32, one row at a time."""

import torch
from torch import Tensor

from lora_kernels.batch import LoraBatch
from lora_kernels.table import SlotTable, SlotWeights


def add_lora_reference(
    y: Tensor, x: Tensor, table: SlotTable[SlotWeights], batch: LoraBatch
) -> None:
    """Do what `lora_kernels.add_lora` does, by the definition."""
    for segment, slot in enumerate(batch.segment_slot):
        start, stop = batch.segment_indptr[segment : segment + 2]
        for row in batch.permutation[start:stop].tolist():
            _add_row(y[row], x[row].to(torch.float32), table, slot)


def _add_row(y: Tensor, x: Tensor, table: SlotTable[SlotWeights], slot: int) -> None:
    for index in range(len(table.slice_sizes)):
        part = table.slice(slot, index)
        if part is None:
            continue
        shrunk = part.a.to(torch.float32) @ x  # [rank]
        update = part.scaling * (part.b.to(torch.float32) @ shrunk)  # [slice]
        columns = y[table.slice_indptr[index] : table.slice_indptr[index + 1]]
        columns.copy_(columns.to(torch.float32) + update)
