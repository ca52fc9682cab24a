"""Attention on CPUs: bit-equal under chunking, prefix hits, preemption and any neighbours.

Softmax is computed tile by tile with a running maximum (Milakov & Gimelshein 2018, as in
FlashAttention). Three things make a query's bits its own:

- a tile's partial result (its own maximum, sum and weighted values) comes from GEMMs of one shape,
  [multiple of 16 query rows, head_dim] x [head_dim, 64], whether the query is a decode or part of
  a chunk;
- partial results are combined in the order of the tiles by the same element-wise operations;
- a tile that a query cannot see at all changes nothing, exactly: its weight is exp(-inf) = 0 and
  the decay is exp(0) = 1.

The query heads of a KV head are rows of one GEMM, so keys and values are never repeated.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.runner.attention import AttentionShape
from engine.runner.attention_tiles import (
    KV_TILE,
    ChunkTiles,
    DecodeTiles,
    chunk_tiles,
    decode_tiles,
)
from engine.runner.batch_inputs import BatchInputs
from engine.runner.kv_cache import KVCache
from engine.runner.padding import padded_rows

_LOWEST = -1e30
"""A maximum over nothing. Finite, so that differences of two of them are 0 and not NaN."""


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """Tiles of one step's rows, for one window."""

    decode: DecodeTiles | None
    chunks: tuple[ChunkTiles, ...]


class CpuAttention:
    """The CPU's `AttentionBackend`."""

    def __init__(self, shape: AttentionShape) -> None:
        self._num_kv_heads = shape.num_kv_heads
        self._group = shape.group_size
        self._head_dim = shape.head_dim
        self._scale = shape.scale
        self._softcap = shape.softcap
        self._windows = frozenset(shape.windows)

    def plan(self, inputs: BatchInputs, kv_cache: KVCache) -> Mapping[int | None, CpuAttentionPlan]:
        """Tiles for each window that the model's layers have."""
        if KV_TILE % kv_cache.block_size:
            raise ConfigError(f"block_size must divide {KV_TILE}, not {kv_cache.block_size}")
        lengths = np.diff(inputs.query_start_loc)
        single, several = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        heads, group = self._num_kv_heads, self._group
        return {
            window: CpuAttentionPlan(
                decode=decode_tiles(inputs, single, kv_cache, heads, window)
                if len(single)
                else None,
                chunks=tuple(
                    chunk_tiles(inputs, int(row), kv_cache, heads, group, window) for row in several
                ),
            )
            for window in self._windows
        }

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        layer: int,
        window: int | None,
        plan: Mapping[int | None, CpuAttentionPlan],
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        keys, values = kv_cache.layer(layer)
        tiles = plan[window]
        if tiles.decode is not None:
            rows = self._attend_decode(query, keys, values, tiles.decode)
            out.index_copy_(0, tiles.decode.tokens, rows)
        for chunk in tiles.chunks:
            rows = self._attend_chunk(query, keys, values, chunk)
            out[chunk.first : chunk.first + chunk.length] = rows
        return out

    def _attend_decode(self, query: Tensor, keys: Tensor, values: Tensor, t: DecodeTiles) -> Tensor:
        heads, group, dim = self._num_kv_heads, self._group, self._head_dim
        num_rows, num_items = t.tokens.shape[0], t.item_row.shape[0]
        padded = padded_rows(group)
        rows = query.new_zeros(heads, num_rows, padded, dim)
        rows[:, :, :group] = (
            query.index_select(0, t.tokens).view(num_rows, heads, group, dim).transpose(0, 1)
        )
        queries = rows.index_select(1, t.item_row).view(heads * num_items, padded, dim)

        scores = torch.bmm(queries, _gather(keys, t.blocks).transpose(1, 2))[:, :group]
        scores = self._scaled(scores).view(heads, num_items, group, KV_TILE)
        maxima, totals = _softmax_(scores.add_(t.bias))
        weights = query.new_zeros(heads * num_items, padded, KV_TILE)
        weights[:, :group] = scores.view(heads * num_items, group, KV_TILE)
        parts = torch.bmm(weights, _gather(values, t.blocks))[:, :group]
        parts = parts.to(torch.float32).view(heads, num_items, group, dim)

        spread = maxima.new_full((len(t.active), heads, num_rows, group, 1), _LOWEST)
        offset = 0
        for step, count in enumerate(t.active):
            spread[step, :, :count] = maxima[:, offset : offset + count]
            offset += count
        running = spread.cummax(0).values
        before = torch.cat((torch.full_like(running[:1], _LOWEST), running[:-1]))
        decay, weight = (before - running).exp_(), (spread - running).exp_()

        result = parts.new_zeros(heads, num_rows, group, dim)
        total = parts.new_zeros(heads, num_rows, group, 1)
        offset = 0
        for step, count in enumerate(t.active):
            items = slice(offset, offset + count)
            old, new = decay[step, :, :count], weight[step, :, :count]
            result[:, :count].mul_(old).add_(parts[:, items].mul_(new))
            total[:, :count].mul_(old).add_(totals[:, items].mul_(new))
            offset += count
        merged = result.div_(total).transpose(0, 1).reshape(num_rows, -1)
        return merged.to(query.dtype)

    def _attend_chunk(self, query: Tensor, keys: Tensor, values: Tensor, t: ChunkTiles) -> Tensor:
        heads, group, dim = self._num_kv_heads, self._group, self._head_dim
        num_rows = t.length * group
        padded = padded_rows(num_rows)
        chunk = query[t.first : t.first + t.length].view(t.length, heads, group, dim)
        queries = query.new_zeros(heads, padded, dim)
        queries[:, :num_rows] = chunk.transpose(0, 1).reshape(heads, num_rows, dim)
        tiled = (heads, len(t.steps), KV_TILE, dim)
        keys, values = _gather(keys, t.blocks).view(tiled), _gather(values, t.blocks).view(tiled)

        running = torch.full((heads, padded, 1), _LOWEST)
        total = torch.zeros(heads, padded, 1)
        result = torch.zeros(heads, padded, dim)
        for index, step in enumerate(t.steps):
            seeing = slice(step.begin, step.end)
            scores = self._scaled(torch.bmm(queries[:, seeing], keys[:, index].transpose(1, 2)))
            if step.bias is not None:
                scores.add_(step.bias)
            maxima, sums = _softmax_(scores)
            parts = torch.bmm(scores.to(query.dtype), values[:, index]).to(torch.float32)
            before = running[:, seeing]
            after = torch.maximum(before, maxima)
            old, new = (before - after).exp_(), (maxima - after).exp_()
            result[:, seeing].mul_(old).add_(parts.mul_(new))
            total[:, seeing].mul_(old).add_(sums.mul_(new))
            before.copy_(after)
        merged = result.div_(total)[:, :num_rows].view(heads, t.length, group, dim)
        return merged.transpose(0, 1).reshape(t.length, -1).to(query.dtype)

    def _scaled(self, products: Tensor) -> Tensor:
        scores = products.to(torch.float32)
        if self._softcap is None:
            return scores.mul_(self._scale)
        return scores.mul_(self._scale / self._softcap).tanh_().mul_(self._softcap)


def _softmax_(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a tile's scores into exp(score - maximum), in place; returns maxima and sums."""
    maxima = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    scores.sub_(maxima).exp_()
    return maxima, scores.sum(-1, keepdim=True)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """[kv_heads, blocks, block_size, dim] -> [kv_heads * tiles, KV_TILE, dim], copied."""
    heads, num_blocks, block_size, dim = cache.shape
    flat = cache.view(heads * num_blocks, block_size * dim)
    return flat.index_select(0, blocks).view(-1, KV_TILE, dim)
