"""Device tables and batches on the CPU, where Triton's interpreter runs the kernels."""

import torch

from lora_kernels import LoraBatch, LoraTable
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_table import DeviceLoraTable
from lora_kernels.pool import RankRowPool
from lora_kernels.reference import add_lora_reference
from lora_kernels.tiles import Variant
from lora_kernels.triton_launch import add_lora_triton

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference from the reference, relative to the largest output."""


def poison(table: DeviceLoraTable) -> None:
    """NaN in every pool row that nothing was written to yet."""
    for pool in (table.a_pool, *table.b_pools):
        poison_pool(pool)


def poison_pool(pool: RankRowPool) -> None:
    pool.rows[:, : pool.row_size] = float("nan")


def on_device(table: LoraTable, dtype: torch.dtype, *, pool_rows: int = 256) -> DeviceLoraTable:
    """The same slots, in poisoned pools."""
    slots = [table.weights(slot) for slot in range(table.num_slots)]
    ranks = [b.shape[1] for weights in slots if weights for b in weights.b if b is not None]
    device = DeviceLoraTable.create(
        table.in_features,
        table.slice_sizes,
        table.num_slots,
        max_rank=max([1, *ranks]),
        pool_rows=pool_rows,
        dtype=dtype,
        device="cpu",
    )
    poison(device)
    for slot, weights in enumerate(slots):
        device.install(slot, weights)
    return device


def device_batch(
    batch: LoraBatch,
    table: DeviceLoraTable,
    *,
    variant: Variant | None = None,
    batch_invariant: bool = False,
    spare_rows: int = 0,
) -> DeviceLoraBatch:
    """The same rows; what a shrink leaves is poisoned."""
    device = DeviceLoraBatch(
        max(batch.num_rows, 1) + spare_rows,
        max(batch.num_segments, 1),
        max_slices=table.num_slices,
        max_rank=table.max_rank,
        dtype=table.dtype,
        device="cpu",
        batch_invariant=batch_invariant,
        variant=variant,
        architecture=90,
    )
    device.shrunk.fill_(float("nan"))
    device.update(batch)
    return device


def assert_like_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    table: LoraTable,
    batch: LoraBatch,
    got: torch.Tensor,
) -> None:
    """`got` is y after the update; rows of no segment are untouched to the bit."""
    expected = y.clone()
    add_lora_reference(expected, x, table, batch)
    scale = max(expected.float().abs().max().item(), 1.0)
    difference = (got.float() - expected.float()).abs().max().item()
    assert difference <= TOLERANCE[y.dtype] * scale
    untouched = torch.ones(y.shape[0], dtype=torch.bool)
    untouched[batch.permutation] = False
    assert torch.equal(got[untouched], y[untouched])


def updated(
    y: torch.Tensor, x: torch.Tensor, table: DeviceLoraTable, batch: DeviceLoraBatch
) -> torch.Tensor:
    """A copy of y after the update."""
    got = y.clone()
    add_lora_triton(got, x, table, batch)
    return got
