"""The public operation: validates, then hands over to the path for the tensors' device."""

import torch
from torch import Tensor

from lora_kernels.batch import LoraBatch
from lora_kernels.cpu import add_lora_cpu
from lora_kernels.cpu_native import NativeLoraTable
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_ops import add_lora_device
from lora_kernels.device_table import DeviceLoraTable
from lora_kernels.table import LoraTable

DTYPES = (torch.float32, torch.bfloat16)


def add_lora(
    y: Tensor,
    x: Tensor,
    table: LoraTable | NativeLoraTable | DeviceLoraTable,
    batch: LoraBatch | DeviceLoraBatch,
) -> None:
    """Add each row's low-rank update to y.

    Semantics, for each row r of slot s and each slice i that s has weights for:
    ``y[r, slice i] += scaling[s, i] * (x[r] @ A[s, i].T) @ B[s, i].T``. The product is accumulated
    in float32 and added in float32; the sum is rounded to y's dtype, and before it only
    ``x[r] @ A.T``, to bfloat16, where the compiled path multiplies pairs of bfloat16. Rows of no
    segment, rows past `batch.num_rows` and slices without weights are not touched.

    Args:
        y: [rows, table.out_features], float32 or bfloat16; changed in place. The base's output.
            On CUDA also float16.
        x: [rows, table.in_features], the dtype and device of y. The projection's input.
        table: the projection's slots, made by `CpuKernels.make_table`; a DeviceLoraTable where x is
            on CUDA.
        batch: rows by slot; `rows` is at least `batch.num_rows`. A DeviceLoraBatch on CUDA.

    Raises:
        ValueError: shapes, dtypes, devices or a slot number that do not fit.

    """
    if (
        isinstance(table, NativeLoraTable)
        and isinstance(batch, LoraBatch)
        and table.accepts(y, x, batch)
    ):
        table.add(y, x, batch)
        return
    if isinstance(table, DeviceLoraTable) and isinstance(batch, DeviceLoraBatch):
        add_lora_device(y, x, table, batch)
        return
    if isinstance(table, DeviceLoraTable) or isinstance(batch, DeviceLoraBatch):
        raise ValueError("the table and the batch must both be for the CPU or both for a device")
    if batch.num_segments == 0:
        return
    _validate(y, x, table, batch)
    if isinstance(table, NativeLoraTable):
        table.add(y, x.contiguous(), batch)
    else:
        add_lora_cpu(y, x, table, batch)


def _validate(y: Tensor, x: Tensor, table: LoraTable | NativeLoraTable, batch: LoraBatch) -> None:
    if x.dim() != 2 or x.shape[1] != table.in_features:
        raise ValueError(f"x is {list(x.shape)}, the projection has {table.in_features} inputs")
    if y.shape != (x.shape[0], table.out_features):
        raise ValueError(f"y is {list(y.shape)}, not {[x.shape[0], table.out_features]}")
    if x.shape[0] < batch.num_rows:
        raise ValueError(f"x has {x.shape[0]} rows, the batch {batch.num_rows}")
    if x.dtype != y.dtype or x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype} and y {y.dtype}; both must be one of {DTYPES}")
    if x.device.type != "cpu" or y.device.type != "cpu":
        raise ValueError(f"no kernel for x on {x.device} and y on {y.device}")
    if isinstance(table, NativeLoraTable):
        if x.dtype is not table.dtype:
            raise ValueError(f"x is {x.dtype}, the table is for {table.dtype}")
        if y.stride(1) != 1:
            raise ValueError(f"y's columns must be adjacent; it has stride {y.stride()}")
    if batch.max_slot >= table.num_slots:
        raise ValueError(f"slot {batch.max_slot} of {table.num_slots}")
