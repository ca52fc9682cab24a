"""A step's rows in device memory: which tile of rows belongs to which slot."""

import numpy as np
import torch
from torch import Tensor

from lora_kernels.batch import LoraBatch
from lora_kernels.tiles import (
    MAX_SPLIT_K,
    SMALL_BATCH_ROWS,
    Tiles,
    Variant,
    pick_variant,
    split_k,
    tiles_for,
)

TILE_FIELDS = 3
"""Slot, first entry of the permutation, number of entries."""


class DeviceLoraBatch:
    """`LoraBatch` for devices: static buffers that `update` fills once a step.

    The buffers also hold what a shrink leaves for its expand, so a batch can serve only one stream.

    With a `variant` the batch is static: grids are sized for the capacity, tiles without rows end
    at once, and a captured CUDA graph replays with any later rows. Without one, each update picks
    the variant, and grids cover only the tiles and ranks of the current rows.
    """

    def __init__(
        self,
        max_rows: int,
        max_segments: int,
        *,
        max_slices: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        batch_invariant: bool = True,
        variant: Variant | None = None,
        architecture: int | None = None,
    ) -> None:
        """Allocate for batches of `max_rows` rows and tables up to `max_slices`, `max_rank`.

        `architecture` (compute capability x 10) is the device's own unless given.
        """
        if min(max_rows, max_segments, max_slices, max_rank) < 1:
            raise ValueError("a batch needs room for one row, segment, slice and rank at least")
        if batch_invariant and variant not in (None, "sgmv_16"):
            raise ValueError(f"{variant} is not the variant of batch-invariant batches")
        self.max_rows, self.max_segments = max_rows, max_segments
        self.device, self.dtype = torch.device(device), dtype
        self.batch_invariant = batch_invariant
        self.is_static = variant is not None
        self._architecture = architecture or _architecture(self.device)
        self._max_tiles = max_rows
        self._first_entry = _first_entry(max_rows)
        self._buffer = torch.zeros(_map_values(max_rows), dtype=torch.int32, device=device)
        values = _shrunk_values(max_rows, max_slices, max_rank, batch_invariant=batch_invariant)
        self.shrunk = torch.empty(values, dtype=torch.float32, device=device)
        """Shrunk rows; a table lays them out as it needs."""
        self.num_rows = 0
        self.segment_slot: tuple[int, ...] = ()
        """Slots that have rows."""
        self.segment_indptr: tuple[int, ...] = (0,)
        """Entries `segment_indptr[i]:segment_indptr[i + 1]` of `permutation` have that slot."""
        self.variant: Variant = variant or pick_variant(0, 0, batch_invariant=batch_invariant)
        self._is_small = max_rows <= SMALL_BATCH_ROWS
        self.num_tiles = self._capacity() if self.is_static else 0
        """Tiles that a launch covers."""

    @property
    def is_empty(self) -> bool:
        """Whether launches would do nothing. Never for a static batch: it may be filled later."""
        return not self.is_static and not self.segment_slot

    @property
    def tiles(self) -> Tiles:
        """Tile sizes of the batch's variant."""
        return tiles_for(self.variant, self.dtype, self._architecture)

    @property
    def tile_map(self) -> Tensor:
        """[tiles, 3] int32: slot, first entry, number of entries (0: nothing to do)."""
        return self._buffer[: TILE_FIELDS * self._max_tiles].view(-1, TILE_FIELDS)

    @property
    def permutation(self) -> Tensor:
        """[max_rows] int32: row numbers, segment after segment."""
        return self._buffer[self._first_entry :]

    def split_k(self, in_features: int) -> int:
        """How many parts a shrink's sum over its inputs is cut into."""
        return 1 if self.batch_invariant or not self._is_small else split_k(in_features)

    def shrunk_view(self, num_slices: int, max_rank: int, num_parts: int) -> Tensor:
        """[num_parts, num_slices, entries, ranks] float32, a view of `shrunk`.

        Raises ValueError where the batch was made for smaller tables.
        """
        entries = min(self.max_rows, SMALL_BATCH_ROWS) if num_parts > 1 else self.max_rows
        shape = (num_parts, num_slices, entries, _padded_rank(max_rank))
        size = num_parts * num_slices * entries * shape[3]
        if size > self.shrunk.numel():
            raise ValueError(
                f"a table of {num_slices} slices and ranks up to {max_rank} needs "
                f"{size} shrunk values, the batch has room for {self.shrunk.numel()}"
            )
        return self.shrunk[:size].view(shape)

    def update(self, batch: LoraBatch) -> None:
        """Take a step's rows; the copy to the device is queued on the current stream.

        Raises ValueError where the batch is past the capacity; nothing is then changed.
        """
        indptr = np.asarray(batch.segment_indptr, dtype=np.int64)
        lengths = np.diff(indptr)
        order = batch.permutation.numpy()
        self._check(batch, order)
        live = np.flatnonzero(lengths)
        if not self.is_static:
            self.variant = pick_variant(len(order), len(live), batch_invariant=self.batch_invariant)
            self._is_small = len(order) <= SMALL_BATCH_ROWS
        host = np.zeros(self._buffer.shape[0], dtype=np.int32)
        tiles = _tile_map(np.asarray(batch.segment_slot), indptr, lengths, self.tiles.rows)
        host[: tiles.size] = tiles.ravel()
        first = self._first_entry
        host[first : first + len(order)] = order
        self._copy(torch.from_numpy(host))
        self.num_rows = batch.num_rows
        self.segment_slot = tuple(batch.segment_slot[index] for index in live)
        self.segment_indptr = (0, *(int(indptr[index + 1]) for index in live))
        if not self.is_static:
            self.num_tiles = len(tiles)

    def _copy(self, host: Tensor) -> None:
        if self.device.type == "cuda":
            # A new pinned block each step (PyTorch caches them): the last may still be in flight.
            host = host.pin_memory()
        self._buffer.copy_(host, non_blocking=True)

    def _capacity(self) -> int:
        rows = self.tiles.rows
        return min(self.max_rows, (self.max_rows + self.max_segments * (rows - 1)) // rows)

    def _check(self, batch: LoraBatch, order: np.ndarray) -> None:
        if batch.num_rows > self.max_rows or batch.num_segments > self.max_segments:
            raise ValueError(
                f"{batch.num_rows} rows in {batch.num_segments} segments: there is room for "
                f"{self.max_rows} in {self.max_segments}"
            )
        if len(order) != batch.segment_indptr[-1]:
            raise ValueError(f"{len(order)} entries, segments end at {batch.segment_indptr[-1]}")
        if len(order) and (order.min() < 0 or order.max() >= batch.num_rows):
            raise ValueError(f"an entry is no row of the {batch.num_rows} in the batch")


def batch_bytes(
    max_rows: int, *, max_slices: int, max_rank: int, batch_invariant: bool = True
) -> int:
    """Bytes of device memory that a batch of this capacity holds."""
    values = _shrunk_values(max_rows, max_slices, max_rank, batch_invariant=batch_invariant)
    return 4 * (_map_values(max_rows) + values)


def _map_values(max_rows: int) -> int:
    return _first_entry(max_rows) + max_rows


def _first_entry(max_rows: int) -> int:
    # On 16 bytes whatever the capacity: kernels are compiled anew for pointers that are not.
    return -(-TILE_FIELDS * max_rows // 4) * 4


def _shrunk_values(max_rows: int, max_slices: int, max_rank: int, *, batch_invariant: bool) -> int:
    parts = 1 if batch_invariant else MAX_SPLIT_K
    entries = max(max_rows, parts * min(max_rows, SMALL_BATCH_ROWS))
    return entries * max_slices * _padded_rank(max_rank)


def _tile_map(
    slots: np.ndarray, indptr: np.ndarray, lengths: np.ndarray, tile_rows: int
) -> np.ndarray:
    """[tiles, 3]: segments cut into tiles of at most `tile_rows` entries; empty ones have none."""
    counts = -(-lengths // tile_rows)
    segment = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = indptr[:-1][segment] + within * tile_rows
    count = np.minimum(indptr[1:][segment] - start, tile_rows)
    return np.stack([slots[segment], start, count], axis=1).astype(np.int32)


def _padded_rank(max_rank: int) -> int:
    """Shrunk rows start on 64 bytes."""
    return -(-max_rank // 16) * 16


def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f"{device} has no compute capability: give `architecture`")
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
