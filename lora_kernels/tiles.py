"""Tile sizes of the Triton kernels: fixed by architecture and dtype, never by what a batch holds.

No autotuning: a tile decides the order of sums, so the same weights must always meet the same
tile, and a start must not wait for a search.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Variant = Literal["bgmv", "sgmv_16", "sgmv_64"]
"""bgmv: one row a program, for decode. sgmv_N: up to N rows of one segment a program."""
VARIANTS: tuple[Variant, ...] = ("bgmv", "sgmv_16", "sgmv_64")

BGMV_MAX_MEAN_ROWS = 2
"""With more rows in a segment, reading the weights once for all of them is cheaper."""
SGMV_16_MAX_MEAN_ROWS = 32

SMALL_BATCH_ROWS = 256
"""Up to this many rows, a batch has too few tiles for all processors; split-K uses the others."""
SPLIT_K_CHUNK = 1024
MAX_SPLIT_K = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel cuts its work."""

    ranks: int
    """Ranks that one iteration takes."""
    columns: int
    """Inputs that one iteration takes (shrink), or outputs of one program (expand)."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """A variant's tiles; both kernels walk the same tile map.

    A shrink fills whole steps of ranks, with zeros past the slot's own, and an expand reads whole
    steps: `shrink.ranks` is a multiple of `expand.ranks`.
    """

    rows: int
    """Rows of a segment that a program takes."""
    shrink: Tile
    expand: Tile


ARCHITECTURES = (80, 90, 100)
"""Compute capability x 10 of the tables below; a device uses the newest one not past its own."""

_AMPERE_HALF: Mapping[Variant, Tiles] = {
    "bgmv": Tiles(1, shrink=Tile(8, 1024, 4, 2), expand=Tile(4, 256, 1, 2)),
    "sgmv_16": Tiles(16, shrink=Tile(16, 256, 4, 3), expand=Tile(16, 128, 2, 2)),
    "sgmv_64": Tiles(64, shrink=Tile(16, 128, 4, 3), expand=Tile(16, 64, 4, 2)),
}
# A stage more in flight: twice the bandwidth of sm_80 at about the same latency.
_HOPPER_HALF: Mapping[Variant, Tiles] = {
    **_AMPERE_HALF,
    "sgmv_16": Tiles(16, shrink=Tile(16, 256, 4, 4), expand=Tile(16, 128, 2, 2)),
    "sgmv_64": Tiles(64, shrink=Tile(16, 128, 4, 4), expand=Tile(16, 64, 4, 2)),
}
# Half the columns: elements are twice as wide, and exact products use no tensor cores.
_FLOAT: Mapping[Variant, Tiles] = {
    "bgmv": Tiles(1, shrink=Tile(8, 512, 4, 2), expand=Tile(8, 128, 1, 2)),
    "sgmv_16": Tiles(16, shrink=Tile(16, 64, 4, 3), expand=Tile(16, 64, 4, 2)),
    "sgmv_64": Tiles(64, shrink=Tile(16, 32, 4, 3), expand=Tile(16, 64, 8, 2)),
}
_HALF_TABLES: Mapping[int, Mapping[Variant, Tiles]] = {
    80: _AMPERE_HALF,
    90: _HOPPER_HALF,
    100: _HOPPER_HALF,
}


def tiles_for(variant: Variant, dtype: torch.dtype, architecture: int) -> Tiles:
    """A variant's tiles; `architecture` is the compute capability x 10.

    Raises ValueError for an architecture before the oldest of the tables.
    """
    table = max((known for known in ARCHITECTURES if known <= architecture), default=None)
    if table is None:
        raise ValueError(f"compute capability {architecture / 10} is before 8.0")
    return (_FLOAT if dtype == torch.float32 else _HALF_TABLES[table])[variant]


def split_k(in_features: int) -> int:
    """Parts that a small batch's sum over inputs is cut into, where bits may depend on the batch.

    The parts are added in their order: the same batch always gives the same bits.
    """
    return min(MAX_SPLIT_K, -(-in_features // SPLIT_K_CHUNK))


def pick_variant(num_entries: int, num_segments: int, *, batch_invariant: bool) -> Variant:
    """The variant for a batch of `num_entries` rows in `num_segments` segments with rows.

    Where bits must not depend on the batch, every batch gets the same one.
    """
    if batch_invariant:
        return "sgmv_16"
    mean_rows = num_entries / max(num_segments, 1)
    if num_entries <= SMALL_BATCH_ROWS and mean_rows <= BGMV_MAX_MEAN_ROWS:
        return "bgmv"
    return "sgmv_16" if mean_rows <= SGMV_16_MAX_MEAN_ROWS else "sgmv_64"
