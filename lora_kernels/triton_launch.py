"""The device path: turns a table and a batch into launches of the Triton kernels."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_table import DeviceLoraTable
from lora_kernels.kernel_call import KernelCall, is_interpreted
from lora_kernels.tiles import Tile
from lora_kernels.triton_bgmv import bgmv_expand_kernel, bgmv_shrink_kernel
from lora_kernels.triton_sgmv import sgmv_expand_kernel, sgmv_shrink_kernel


def add_lora_triton(y: Tensor, x: Tensor, table: DeviceLoraTable, batch: DeviceLoraBatch) -> None:
    """Do what `lora_kernels.add_lora` does in two launches; operands are checked by it.

    Never waits for the device, so that it can be captured in a CUDA graph (a static batch).
    """
    for call in plan(y, x, table, batch):
        call.run()


def plan(y: Tensor, x: Tensor, table: DeviceLoraTable, batch: DeviceLoraBatch) -> list[KernelCall]:
    """The launches of `add_lora_triton`: shrink, expand; none where there is nothing to do."""
    largest_rank = table.max_rank if batch.is_static else table.largest_rank(batch.segment_slot)
    if batch.num_tiles == 0 or largest_rank == 0:
        return []
    num_parts = batch.split_k(table.in_features)
    shrunk = batch.shrunk_view(table.num_slices, table.max_rank, num_parts)
    return [
        _shrink(shrunk, x, table, batch, largest_rank),
        _expand(y, shrunk, table, batch),
    ]


def _shrink(
    shrunk: Tensor, x: Tensor, table: DeviceLoraTable, batch: DeviceLoraBatch, largest_rank: int
) -> KernelCall:
    tile = batch.tiles.shrink
    rank_tiles = -(-largest_rank // tile.ranks)
    return _call(
        batch,
        table,
        tile,
        shrunk,
        kernel=bgmv_shrink_kernel if batch.variant == "bgmv" else sgmv_shrink_kernel,
        grid=(batch.num_tiles, rank_tiles, table.num_slices * shrunk.shape[0]),
        arguments={
            "x_ptr": x,
            "a_ptr": table.a_pool.rows,
            "in_features": table.in_features,
            "stride_x": x.stride(0),
            "stride_a": table.a_pool.rows.stride(0),
        },
        constants={"BLOCK_K": tile.columns},
    )


def _expand(
    y: Tensor, shrunk: Tensor, table: DeviceLoraTable, batch: DeviceLoraBatch
) -> KernelCall:
    tile = batch.tiles.expand
    column_tiles = sum(-(-size // tile.columns) for size in table.slice_sizes)
    pools = [pool.rows for pool in table.b_pools]
    pools += pools[:1] * (3 - len(pools))
    is_aligned = all(size % 16 == 0 for size in table.slice_sizes)
    return _call(
        batch,
        table,
        tile,
        shrunk,
        kernel=bgmv_expand_kernel if batch.variant == "bgmv" else sgmv_expand_kernel,
        grid=(batch.num_tiles, column_tiles),
        arguments={
            "y_ptr": y,
            "slice_offsets_ptr": table.slice_offsets,
            "stride_y": y.stride(0),
            **{f"b{index}_ptr": pool for index, pool in enumerate(pools)},
            **{f"stride_b{index}": pool.stride(0) for index, pool in enumerate(pools)},
        },
        constants={"BLOCK_N": tile.columns, "ALIGNMENT": 16 if is_aligned else 1},
    )


def _call(
    batch: DeviceLoraBatch,
    table: DeviceLoraTable,
    tile: Tile,
    shrunk: Tensor,
    *,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Tensor | int],
    constants: Mapping[str, int | bool],
) -> KernelCall:
    """Add what every kernel takes."""
    common: dict[str, Tensor | int] = {
        "t_ptr": shrunk,
        "slots_ptr": table.slots,
        "tiles_ptr": batch.tile_map,
        "permutation_ptr": batch.permutation,
        "stride_split": shrunk.stride(0),
        "stride_slice": shrunk.stride(1),
        "stride_entry": shrunk.stride(2),
    }
    shape: dict[str, int | bool] = {
        "NUM_SLICES": table.num_slices,
        "MAX_PAGES": table.max_pages,
        "SPLIT_K": shrunk.shape[0],
        "BLOCK_R": tile.ranks,
    }
    if batch.variant != "bgmv":
        shape |= {"BLOCK_M": batch.tiles.rows, "UPCAST": is_interpreted()}
    return KernelCall(
        kernel=kernel,
        grid=grid,
        arguments={**common, **arguments},
        constants={**shape, **constants},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
