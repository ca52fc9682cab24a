"""Paged keys and values: blocks of 16 tokens, one pool for all layers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What a model keeps of one block of tokens, over all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens of a block."""
    dtype: torch.dtype
    """Of the stored keys and values."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        values = self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.block_size
        return values * self.dtype.itemsize


class KVCache:
    """Storage of `num_blocks` blocks, and of one more that always reads as zeros.

    A block must be cleared when its first position is written (`clear_blocks`). Attention
    multiplies masked values by zero, and 0 * NaN is NaN: otherwise a sequence whose values
    overflowed would poison the next owner of its blocks.
    """

    needs_clearing: ClassVar[bool] = True
    """Whether `clear_blocks` does anything; if so, the runner calls it."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        # [layer, key or value, head, block, offset, channel]: a head's block is contiguous.
        # Not zeroed, so that the system commits memory only as blocks are first used.
        sizes = (
            shape.num_layers, 2, shape.num_kv_heads, num_blocks + 1, shape.block_size,
            shape.head_dim,
        )  # fmt: skip
        self._storage = torch.empty(sizes, dtype=shape.dtype, device=device)
        self._storage[:, :, :, self.zero_block] = 0

    @property
    def zero_block(self) -> int:
        """Index of the block that nobody writes."""
        return self.num_blocks

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_kv_heads, num_blocks + 1, block_size, head_dim]."""
        return self._storage[index, 0], self._storage[index, 1]

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store keys and values, each [num_tokens, num_kv_heads, head_dim], of a step."""
        for cache, new in zip(self.layer(layer), (key, value), strict=True):
            heads, blocks, size, channels = cache.shape
            flat = cache.view(heads, blocks * size, channels)
            flat.index_copy_(1, slot_mapping, new.transpose(0, 1))

    def clear_blocks(self, blocks: Tensor) -> None:
        """Make blocks ([num_blocks] int64, their indices) read as zeros, in all layers."""
        if blocks.numel():
            self._storage.index_fill_(3, blocks, 0)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks, in order, in all layers."""
        for source, destination in pairs:
            self._storage[:, :, :, destination] = self._storage[:, :, :, source]
