"""Tile sizes of the attention kernel, and how many programs share a row's positions.

Fixed by architecture, dtype and head size, never searched for: a tile decides the order of sums,
so the same model must always meet the same tile, and a start must not wait.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

Kind = Literal["decode", "chunk"]
"""decode: one token in each row. chunk: any number of tokens; also all batch-invariant steps."""

MAX_GROUP = 64
"""Query heads that may share a KV head: all of them are rows of one tile."""
MAX_HEAD_DIM = 256
_NARROW = 128

_SPLIT_POSITIONS = 256
"""Fewer positions than this are not worth another program."""
_MAX_SPLITS = 32
_PROGRAMS_A_PROCESSOR = 4
_PROCESSORS: Mapping[int, int] = {80: 108, 90: 132, 100: 148}
"""Streaming multiprocessors of A100, H100 and B200; other GPUs use the number of their kin."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How a program cuts its work."""

    rows: int
    """Queries times heads of a group; a multiple of 16, as tensor cores require."""
    positions: int
    """Positions of keys and values in one iteration: 16 KiB each in 16 bits."""
    num_warps: int
    num_stages: int


def table_of(architecture: int) -> int:
    """The table (80, 90, 100) that a compute capability x 10 uses.

    12.x has the shared memory of 8.x and not of 10.x, so it takes the table of 8.0. Raises
    ValueError for a GPU older than 8.0.
    """
    if architecture < 80:
        raise ValueError(f"compute capability {architecture / 10} is before 8.0")
    if architecture >= 120:
        return 80
    return max(known for known in _PROCESSORS if known <= architecture)


def attention_tile(
    kind: Kind, group: int, head_dim: int, dtype: torch.dtype, architecture: int
) -> AttentionTile:
    """The tile for `group` query heads a KV head, of `head_dim` channels; `dtype` is the keys'.

    Raises ValueError for heads or groups that are too large.
    """
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{group} query heads share a KV head; the kernel takes up to {MAX_GROUP}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"heads have {head_dim} channels; the kernel takes up to {MAX_HEAD_DIM}")
    table = table_of(architecture)
    narrow, wide = (_FLOAT if dtype is torch.float32 else _HALF[table])[kind]
    is_fp8, is_wide = dtype is torch.uint8, head_dim > _NARROW
    tile = wide if is_wide else narrow
    # Floats made of bytes stand beside them in registers: of whole tiles, some would spill. So
    # would the scores of small heads on sm_100 (Triton 3.6), where a thread has 128 registers.
    if (is_fp8 and (kind == "decode" or is_wide)) or (
        table == 100 and kind == "chunk" and head_dim <= _NARROW // 2 and tile.positions > 32
    ):
        tile = replace(tile, positions=tile.positions // 2)
    return replace(tile, rows=max(tile.rows, 1 << (group - 1).bit_length()))


def padded_head_dim(head_dim: int) -> int:
    """Channels of a tile: a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def choose_num_splits(
    num_rows: int, num_kv_heads: int, max_positions: int, architecture: int
) -> int:
    """Programs that share the positions of each row of a decode step; a power of two.

    Enough to keep every processor's memory pipes full, by what is known before a step: rows the
    step has room for, and positions the longest sequence may have.
    """
    wanted = _PROGRAMS_A_PROCESSOR * _PROCESSORS[table_of(architecture)]
    programs = max(1, num_rows * num_kv_heads)
    useful = -(-max_positions // _SPLIT_POSITIONS)
    num_splits = 1
    while num_splits < _MAX_SPLITS and num_splits < useful and num_splits * programs < wanted:
        num_splits *= 2
    return num_splits


_HALF: Mapping[int, Mapping[Kind, tuple[AttentionTile, AttentionTile]]] = {
    80: {
        "decode": (AttentionTile(16, 64, 4, 3), AttentionTile(16, 32, 4, 3)),
        "chunk": (AttentionTile(128, 32, 8, 3), AttentionTile(64, 32, 8, 2)),
    },
    90: {
        "decode": (AttentionTile(16, 64, 4, 3), AttentionTile(16, 32, 4, 3)),
        "chunk": (AttentionTile(128, 64, 8, 3), AttentionTile(128, 32, 8, 3)),
    },
    100: {
        "decode": (AttentionTile(16, 64, 4, 3), AttentionTile(16, 32, 4, 3)),
        "chunk": (AttentionTile(128, 64, 8, 3), AttentionTile(128, 32, 8, 3)),
    },
}
"""For heads of up to 128 channels, and for wider ones. Block numbers are read a step before the
keys and values that they lead to, which the pipeline counts as a stage of its own."""
# Exact products use no tensor cores, and elements are twice as wide.
_FLOAT: Mapping[Kind, tuple[AttentionTile, AttentionTile]] = {
    "decode": (AttentionTile(16, 16, 4, 2), AttentionTile(16, 16, 4, 2)),
    "chunk": (AttentionTile(16, 16, 4, 2), AttentionTile(16, 16, 4, 2)),
}
