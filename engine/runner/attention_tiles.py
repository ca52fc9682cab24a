"""Which KV tiles each query needs: the geometry of `engine.runner.cpu_attention`, in numpy.

Tiles are 64 positions, anchored at position 0, so that a query meets the same tiles in the same
order however its sequence was cut into chunks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.runner.batch_inputs import NO_BLOCK, BatchInputs, IntArray
from engine.runner.kv_cache import KVCache
from engine.runner.padding import ROW_TILE, padded_rows

KV_TILE = 64


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Rows with one query each. (row, tile) pairs are *items*, ordered by tile, then by row.

    Rows are sorted by their number of tiles, most first. So the rows that have a t-th tile are the
    first `active[t]` ones, and the items of their t-th tiles are adjacent.
    """

    tokens: Tensor
    """[rows] int64: the rows' tokens in the batch."""
    active: tuple[int, ...]
    item_row: Tensor
    """[items] int64."""
    blocks: Tensor
    """[kv_heads * items * blocks a tile]: rows of a cache flattened to [kv_heads * blocks, -1]."""
    bias: Tensor
    """[items, 1, KV_TILE] float32: 0 where the query sees the position, else -inf."""


@dataclass(frozen=True, slots=True)
class TileStep:
    """One tile of a chunk, and which of the chunk's query rows can see any of it."""

    begin: int
    end: int
    """Multiples of `ROW_TILE`."""
    bias: Tensor | None
    """[end - begin, KV_TILE] float32; None where all rows see all of the tile."""


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """One row with several queries. A query row is a (token, head of the KV head's group) pair."""

    first: int
    """The first token in the batch."""
    length: int
    """Tokens."""
    blocks: Tensor
    """[kv_heads * tiles * blocks a tile]: as in `DecodeTiles`."""
    steps: tuple[TileStep, ...]


def decode_tiles(
    inputs: BatchInputs, rows: IntArray, kv_cache: KVCache, num_kv_heads: int, window: int | None
) -> DecodeTiles:
    """Tiles of the rows with one query each."""
    positions = inputs.starts[rows]
    first_tiles = _first_tile(positions, window)
    counts = positions // KV_TILE - first_tiles + 1
    by_count = np.argsort(-counts, kind="stable")
    rows, positions = rows[by_count], positions[by_count]
    first_tiles, counts = first_tiles[by_count], counts[by_count]

    steps, item_row = np.nonzero(np.arange(counts[0])[:, None] < counts[None, :])
    tiles = first_tiles[item_row] + steps
    seen = tiles[:, None] * KV_TILE + np.arange(KV_TILE)
    visible = _visible(seen, positions[item_row, None], window)
    return DecodeTiles(
        tokens=torch.from_numpy(inputs.query_start_loc[rows]),
        active=tuple(np.bincount(steps).tolist()),
        item_row=torch.from_numpy(item_row),
        blocks=_flat_blocks(inputs.block_tables[rows[item_row]], tiles, kv_cache, num_kv_heads),
        bias=_bias(visible).unsqueeze(1),
    )


def chunk_tiles(
    inputs: BatchInputs,
    row: int,
    kv_cache: KVCache,
    num_kv_heads: int,
    group: int,
    window: int | None,
) -> ChunkTiles:
    """Tiles of one row with several queries; `group` query heads share a KV head."""
    first, stop = (int(token) for token in inputs.query_start_loc[row : row + 2])
    length = stop - first
    start = int(inputs.starts[row])
    query_row = np.arange(padded_rows(length * group))
    positions = start + np.minimum(query_row // group, length - 1)
    first_tile = int(_first_tile(positions[:1], window)[0])
    tiles = np.arange(first_tile, int(positions[-1]) // KV_TILE + 1)
    tables = np.broadcast_to(inputs.block_tables[row], (len(tiles), inputs.block_tables.shape[1]))
    return ChunkTiles(
        first=first,
        length=length,
        blocks=_flat_blocks(tables, tiles, kv_cache, num_kv_heads),
        steps=tuple(_tile_step(int(tile), positions, window) for tile in tiles),
    )


def _tile_step(tile: int, positions: IntArray, window: int | None) -> TileStep:
    low, high = tile * KV_TILE, tile * KV_TILE + KV_TILE - 1
    begin = int(np.searchsorted(positions, low)) // ROW_TILE * ROW_TILE
    end = len(positions)
    if window is not None:
        end = padded_rows(int(np.searchsorted(positions, high + window)))
    queries = positions[begin:end]
    whole = queries[0] >= high and (window is None or queries[-1] - window < low)
    if whole:
        return TileStep(begin, end, None)
    seen = low + np.arange(KV_TILE)
    return TileStep(begin, end, _bias(_visible(seen[None, :], queries[:, None], window)))


def _first_tile(positions: IntArray, window: int | None) -> IntArray:
    if window is None:
        return np.zeros_like(positions)
    return np.maximum(positions - window + 1, 0) // KV_TILE


def _visible(seen: IntArray, positions: IntArray, window: int | None) -> np.ndarray:
    visible = seen <= positions
    if window is not None:
        visible &= seen > positions - window
    return visible


def _bias(visible: np.ndarray) -> Tensor:
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))


def _flat_blocks(tables: IntArray, tiles: IntArray, kv_cache: KVCache, num_kv_heads: int) -> Tensor:
    per_tile = KV_TILE // kv_cache.block_size
    columns = tiles[:, None] * per_tile + np.arange(per_tile)
    inside = columns < tables.shape[1]
    blocks = np.take_along_axis(tables, np.where(inside, columns, 0), axis=1)
    blocks = np.where(inside & (blocks != NO_BLOCK), blocks, kv_cache.zero_block)
    heads = np.arange(num_kv_heads)[:, None] * (kv_cache.num_blocks + 1)
    return torch.from_numpy((heads + blocks.reshape(1, -1)).reshape(-1))
