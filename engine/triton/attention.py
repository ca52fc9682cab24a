"""Attention on GPUs: plans a step's tiles and launches the kernels of `attention_kernel`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.runner.attention import AttentionShape
from engine.runner.batch_inputs import NO_BLOCK, BatchInputs, IntArray
from engine.runner.kv_cache import KVCache
from engine.triton.attention_kernel import combine_splits_kernel, paged_attention_kernel
from engine.triton.kv_cache import TritonKVCache
from engine.triton.query_tiles import TILE_FIELDS, TileMap, chunk_tiles, decode_tiles
from engine.triton.tiles import (
    AttentionTile,
    Kind,
    attention_tile,
    choose_num_splits,
    padded_head_dim,
)
from engine.triton.to_device import to_device
from lora_kernels.kernel_call import KernelCall, is_interpreted


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one launch."""

    kind: Kind
    tiles: Tensor
    """[tiles, 4] int32, on the device; see `engine.triton.query_tiles`."""
    num_splits: int
    partial: Tensor | None = None
    """[tiles, heads, num_splits, head_dim] float32: the result of each share of the positions."""
    lse: Tensor | None = None
    """[tiles, heads, num_splits] float32."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's rows in device memory; serves every layer."""

    block_tables: Tensor
    """[rows, blocks] int32; entries past a row's blocks are never read."""
    groups: tuple[TileGroup, ...]
    num_tokens: int
    """Tokens past these are padding, whose output is zeros."""


class StaticAttentionPlan:
    """A plan for decode steps of a fixed number of rows: a `StaticPlan`."""

    def __init__(self, plan: AttentionPlan, block_size: int) -> None:
        self.plan = plan
        """Its tensors keep their addresses."""
        self._block_size = block_size

    def update(self, inputs: BatchInputs) -> None:
        """See `engine.runner.attention.StaticPlan`; raises ValueError for rows that do not fit.

        A row at position -1 (`starts`) is padding that reads no block, and gets zeros.
        """
        tables = self.plan.block_tables
        rows, blocks = inputs.block_tables.shape
        if rows != tables.shape[0] or blocks > tables.shape[1]:
            raise ValueError(
                f"block tables are {rows} by {blocks}; the plan is for {tables.shape[0]} rows "
                f"of up to {tables.shape[1]}"
            )
        # Copy no more of the tables than the longest row reads: for 128 Ki positions they are
        # megabytes.
        used = min(blocks, int(inputs.starts.max()) // self._block_size + 1)
        tiles = decode_tiles(np.arange(rows), np.arange(rows), inputs.starts)
        host = np.concatenate(
            [tiles.ravel(), inputs.block_tables[:, :used].astype(np.int32).ravel()]
        )
        sent_tiles, sent_tables = to_device(host, tables.device).split([tiles.size, rows * used])
        self.plan.groups[0].tiles.copy_(sent_tiles.view(tiles.shape))
        tables[:, :used].copy_(sent_tables.view(rows, used))


class TritonAttention:
    """The `AttentionBackend` of GPUs, and of Triton's interpreter.

    A step takes one launch for the rows with a single token (and one that combines their splits),
    and one for all other rows. With `batch_invariant` both kinds use the same tiles and no splits,
    so that a row's bits do not depend on the batch.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_positions: int,
        device: torch.device | str,
        batch_invariant: bool = False,
        architecture: int,
    ) -> None:
        """Attention of one model's shape.

        Args:
            shape: heads, windows and scores of the model.
            max_positions: length of the longest sequence, by which splits are chosen.
            device: of queries and caches.
            batch_invariant: whether a row's bits must not depend on the batch or on how its
                prefill was cut.
            architecture: compute capability x 10.

        Raises ConfigError for a shape that the kernel does not take.

        """
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(
                f"{shape.num_heads} query heads are no multiple of {shape.num_kv_heads} KV heads"
            )
        self._num_heads, self._num_kv_heads = shape.num_heads, shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._max_positions = max_positions
        self._device = torch.device(device)
        self._scale = shape.scale
        self._softcap = shape.softcap
        self._batch_invariant = batch_invariant
        self._architecture = architecture
        try:
            self.tile("decode", torch.bfloat16)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def tile(self, kind: Kind, dtype: torch.dtype) -> AttentionTile:
        """The tile sizes of a launch; `dtype` is that of the stored keys."""
        group = self._num_heads // self._num_kv_heads
        kind = "chunk" if self._batch_invariant else kind
        return attention_tile(kind, group, self._head_dim, dtype, self._architecture)

    def plan(self, inputs: BatchInputs, kv_cache: KVCache) -> AttentionPlan:
        """Cut a step's rows into tiles and copy them to the device, in one copy."""
        lengths = np.diff(inputs.query_start_loc)
        first = inputs.query_start_loc[:-1]
        several = np.flatnonzero(lengths > 1)
        single = np.flatnonzero(lengths == 1)
        dtype = kv_cache.layer(0)[0].dtype
        maps: list[tuple[Kind, TileMap]] = []
        if len(single):
            maps.append(("decode", decode_tiles(single, first[single], inputs.starts[single])))
        if len(several):
            tokens = self.tile("chunk", dtype).rows // (self._num_heads // self._num_kv_heads)
            cut = chunk_tiles(
                several, first[several], lengths[several], inputs.starts[several], tokens
            )
            maps.append(("chunk", cut))
        return self.plan_of(maps, inputs.block_tables, inputs.num_tokens)

    def make_static_plan(
        self, num_rows: int, max_blocks: int, kv_cache: KVCache
    ) -> StaticAttentionPlan:
        """See `engine.runner.attention.StaticAttention`."""
        rows = np.arange(num_rows)
        tables = np.full((num_rows, max_blocks), NO_BLOCK, np.int64)
        nothing = decode_tiles(rows, rows, np.full_like(rows, -1))
        plan = self.plan_of([("decode", nothing)], tables, num_rows)
        return StaticAttentionPlan(plan, kv_cache.block_size)

    def static_plan_bytes(self, num_rows: int, max_blocks: int) -> int:
        """See `engine.runner.attention.StaticAttention`."""
        values = num_rows * (TILE_FIELDS + max_blocks)
        num_splits = self._num_splits("decode", num_rows)
        if num_splits > 1:
            values += num_rows * self._num_heads * num_splits * (self._head_dim + 1)
        return 4 * values

    def plan_of(
        self, maps: list[tuple[Kind, TileMap]], block_tables: IntArray, num_tokens: int
    ) -> AttentionPlan:
        """A plan with one launch for each tile map, over rows with these block tables."""
        sizes = [tiles.size for _, tiles in maps]
        # Tiles first, so that each starts on 16 bytes.
        host = np.concatenate(
            [*(tiles.ravel() for _, tiles in maps), block_tables.ravel().astype(np.int32)]
        )
        *parts, tables = to_device(host, self._device).split([*sizes, block_tables.size])
        groups = tuple(
            self._group(kind, part.view(-1, TILE_FIELDS))
            for (kind, _), part in zip(maps, parts, strict=True)
        )
        return AttentionPlan(tables.view(block_tables.shape), groups, num_tokens)

    def _group(self, kind: Kind, tiles: Tensor) -> TileGroup:
        num_splits = self._num_splits(kind, len(tiles))
        if num_splits == 1:
            return TileGroup(kind, tiles, 1)
        # Sized by tiles, so that a row that decodes beside a long prefill takes no more than alone.
        shape = (len(tiles), self._num_heads, num_splits)
        return TileGroup(
            kind,
            tiles,
            num_splits,
            torch.empty(*shape, self._head_dim, dtype=torch.float32, device=self._device),
            torch.empty(*shape, dtype=torch.float32, device=self._device),
        )

    def _num_splits(self, kind: Kind, num_tiles: int) -> int:
        if kind != "decode" or self._batch_invariant:
            return 1
        return choose_num_splits(
            num_tiles, self._num_kv_heads, self._max_positions, self._architecture
        )

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        layer: int,
        window: int | None,
        plan: AttentionPlan | StaticAttentionPlan,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`; `out` [padded, num_heads * head_dim] takes the result.

        Raises ConfigError for float32 queries over an 8-bit cache; that happens at start, when
        memory is measured.
        """
        assert isinstance(kv_cache, TritonKVCache)
        if kv_cache.is_fp8 and query.dtype is torch.float32:
            raise ConfigError(
                "dtype: a float32 model cannot keep its KV cache in 8 bits; serve it in bfloat16 "
                "or float16, or keep keys and values in float32"
            )
        plan = plan.plan if isinstance(plan, StaticAttentionPlan) else plan
        if out is None:
            out = query.new_empty(query.shape[0], self._num_heads * self._head_dim)
        if plan.num_tokens < out.shape[0]:
            out[plan.num_tokens :].zero_()
        for call in self.calls(out, query, kv_cache, layer, window, plan):
            call.run()
        return out

    def calls(
        self,
        out: Tensor,
        query: Tensor,
        kv_cache: TritonKVCache,
        layer: int,
        window: int | None,
        plan: AttentionPlan,
    ) -> Iterator[KernelCall]:
        """The launches of `attend`."""
        assert query.stride()[1:] == (self._head_dim, 1) and out.stride(1) == 1
        for group in plan.groups:
            yield self._attention_call(out, query, kv_cache, layer, window, plan, group)
            if group.num_splits > 1:
                yield self._combine_call(out, group)

    def _attention_call(
        self,
        out: Tensor,
        query: Tensor,
        kv_cache: TritonKVCache,
        layer: int,
        window: int | None,
        plan: AttentionPlan,
        group: TileGroup,
    ) -> KernelCall:
        keys, values = kv_cache.layer(layer)
        scales = kv_cache.layer_scales(layer)
        tile = self.tile(group.kind, keys.dtype)
        return KernelCall(
            kernel=paged_attention_kernel,
            grid=(len(group.tiles), self._num_kv_heads, group.num_splits),
            arguments={
                "out_ptr": out if group.partial is None else group.partial,
                "lse_ptr": scales if group.lse is None else group.lse,
                "q_ptr": query,
                "k_ptr": keys,
                "v_ptr": values,
                "kv_scales_ptr": scales,
                "tables_ptr": plan.block_tables,
                "tiles_ptr": group.tiles,
                "scale": self._scale,
                "softcap": self._softcap or 0.0,
                "window": window or 0,
                "stride_q": query.stride(0),
                "stride_out": out.stride(0),
                "stride_kv_head": keys.stride(0),
                "stride_table": plan.block_tables.stride(0),
            },
            constants={
                "GROUP": self._num_heads // self._num_kv_heads,
                "HEAD_DIM": self._head_dim,
                "BLOCK_SIZE": kv_cache.block_size,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.positions,
                "BLOCK_D": padded_head_dim(self._head_dim),
                "NUM_SPLITS": group.num_splits,
                "HAS_WINDOW": window is not None,
                "HAS_SOFTCAP": self._softcap is not None,
                "KV_IS_FP8": kv_cache.is_fp8,
                "FP8_IS_NATIVE": self._architecture >= 89,
                "HAS_WHOLE_TILES": group.kind == "chunk"
                and window is None
                and not self._batch_invariant,
                "UPCAST": is_interpreted(),
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _combine_call(self, out: Tensor, group: TileGroup) -> KernelCall:
        assert group.partial is not None and group.lse is not None
        return KernelCall(
            kernel=combine_splits_kernel,
            grid=(len(group.tiles), self._num_heads),
            arguments={
                "out_ptr": out,
                "part_ptr": group.partial,
                "lse_ptr": group.lse,
                "tiles_ptr": group.tiles,
                "stride_out": out.stride(0),
            },
            constants={
                "HEAD_DIM": self._head_dim,
                "BLOCK_D": padded_head_dim(self._head_dim),
                "NUM_SPLITS": group.num_splits,
            },
            num_warps=1 if group.num_splits * self._head_dim <= 2048 else 8,
            num_stages=1,
        )
