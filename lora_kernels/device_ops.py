"""Checks the operands of `add_lora` on a device; the kernels themselves check nothing."""

import torch
from torch import Tensor

from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_table import DeviceLoraTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def add_lora_device(y: Tensor, x: Tensor, table: DeviceLoraTable, batch: DeviceLoraBatch) -> None:
    """Do what `lora_kernels.add_lora` does, on a device; also in float16."""
    _validate(y, x, table, batch)
    # Late, so that the CPU path and the service never load Triton.
    from lora_kernels.triton_launch import add_lora_triton

    add_lora_triton(y, x, table, batch)


def _validate(y: Tensor, x: Tensor, table: DeviceLoraTable, batch: DeviceLoraBatch) -> None:
    if x.dim() != 2 or x.shape[1] != table.in_features:
        raise ValueError(f"x is {list(x.shape)}, the projection has {table.in_features} inputs")
    if y.shape != (x.shape[0], table.out_features):
        raise ValueError(f"y is {list(y.shape)}, not {[x.shape[0], table.out_features]}")
    if x.shape[0] < batch.num_rows:
        raise ValueError(f"x has {x.shape[0]} rows, the batch {batch.num_rows}")
    if table.dtype not in DTYPES or {x.dtype, y.dtype, batch.dtype} != {table.dtype}:
        raise ValueError(
            f"x is {x.dtype}, y {y.dtype}, the batch for {batch.dtype} and the table "
            f"{table.dtype}; all must be the same one of {DTYPES}"
        )
    if {x.device, y.device, batch.device} != {table.device}:
        raise ValueError(
            f"x is on {x.device}, y on {y.device}, the batch on {batch.device}, the table on "
            f"{table.device}"
        )
    if x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError(f"columns must be adjacent; x has stride {x.stride()}, y {y.stride()}")
    if batch.segment_slot and max(batch.segment_slot) >= table.num_slots:
        raise ValueError(f"slot {max(batch.segment_slot)} of {table.num_slots}")
