"""Cuts a step's queries into tiles, on the host; one program of the kernel takes one tile."""

import numpy as np
import numpy.typing as npt

from engine.runner.batch_inputs import IntArray

TileMap = npt.NDArray[np.int32]
"""[tiles, 4]: row, first token, tokens, position of the first."""
TILE_FIELDS = 4


def decode_tiles(rows: IntArray, tokens: IntArray, positions: IntArray) -> TileMap:
    """One tile for each row, for rows with one token each.

    A row at position -1 sees nothing, so that its output is zeros and its block table is not read.
    """
    return np.stack((rows, tokens, np.ones_like(rows), positions), axis=1).astype(np.int32)


def chunk_tiles(
    rows: IntArray, first_tokens: IntArray, lengths: IntArray, starts: IntArray, tile_tokens: int
) -> TileMap:
    """Rows with any number of tokens, cut into tiles of up to `tile_tokens`.

    Tiles whose queries see most come first, so that no processor finishes long after the others.
    """
    counts = -(-lengths // tile_tokens)
    index = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = within * tile_tokens
    size = np.minimum(lengths[index] - offset, tile_tokens)
    position = starts[index] + offset
    tiles = np.stack((rows[index], first_tokens[index] + offset, size, position), axis=1)
    return tiles[np.argsort(-(position + size), kind="stable")].astype(np.int32)
