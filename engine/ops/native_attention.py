"""Attention and its cache through the compiled kernel, on blocks of 16 positions.

native/attention.h explains why a row's bits do not depend on the batch.
"""

import torch
from torch import Tensor

from engine.ops.native_library import NativeLibrary
from engine.runner.attention import AttentionShape
from engine.runner.batch_inputs import BatchInputs
from engine.runner.kv_cache import KVCache, KVShape

BLOCK_SIZE = 16
MAX_HEAD_DIM = 256
CHANNEL_TILE = 16
"""The number of channels of a head must be a multiple of this."""


def why_not(head_dim: int, block_size: int) -> str | None:
    """Why the kernel cannot take a model's heads and blocks; None if it can."""
    if block_size != BLOCK_SIZE:
        return f"block_size is {block_size}, not {BLOCK_SIZE}"
    if head_dim > MAX_HEAD_DIM or head_dim % CHANNEL_TILE:
        return f"heads have {head_dim} channels, no multiple of {CHANNEL_TILE} up to {MAX_HEAD_DIM}"
    return None


class NativeKVCache(KVCache):
    """A cache whose blocks the kernel reads lane by lane.

    A block of keys is [channels, 16], of values [16, channels]; in bfloat16 two neighbours of the
    first dimension share a word: [channels / 2, 16, 2] and [8, channels, 2].
    """

    def __init__(self, library: NativeLibrary, shape: KVShape, num_blocks: int) -> None:
        super().__init__(shape, num_blocks)
        self._store_kv = library.store_kv
        self.head_stride: int = self._storage.stride(2)
        """Elements from one head's blocks to the next head's."""
        size, address = self._storage.element_size(), self._storage.data_ptr()
        of_layer, of_values = (size * stride for stride in self._storage.stride()[:2])
        self.addresses = [
            (address + layer * of_layer, address + layer * of_layer + of_values)
            for layer in range(self._storage.shape[0])
        ]
        """Memory addresses of each layer's keys and values."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Copies in the layout of `KVCache.layer`."""
        keys, values = super().layer(index)
        heads, blocks, size, channels = keys.shape
        if keys.dtype is torch.bfloat16:
            pairs = keys.view(heads, blocks, channels // 2, size, 2)
            keys = pairs.permute(0, 1, 3, 2, 4).reshape(keys.shape)
            pairs = values.view(heads, blocks, size // 2, channels, 2)
            return keys, pairs.transpose(3, 4).reshape(values.shape)
        return keys.view(heads, blocks, channels, size).transpose(2, 3).contiguous(), values.clone()

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `KVCache.write`."""
        tokens, heads, channels = key.shape
        assert key.stride()[1:] == value.stride()[1:] == (channels, 1)
        keys, values = self.addresses[layer]
        self._store_kv(
            key.dtype is torch.bfloat16,
            torch.get_num_threads(),
            tokens,
            heads,
            channels,
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            slot_mapping.data_ptr(),
            keys,
            values,
            self.head_stride,
        )


class NativeAttention:
    """An `AttentionBackend` over a `NativeKVCache`."""

    def __init__(self, library: NativeLibrary, instruction_set: int, shape: AttentionShape) -> None:
        self._attend = library.attend
        self._instruction_set = instruction_set
        self._num_kv_heads = shape.num_kv_heads
        self._group = shape.group_size
        self._head_dim = shape.head_dim
        self._scale = shape.scale
        self._softcap = shape.softcap or 0.0

    def plan(self, inputs: BatchInputs, kv_cache: KVCache) -> BatchInputs:
        """The inputs themselves: the kernel needs nothing else."""
        assert inputs.block_tables.flags.c_contiguous
        return inputs

    def attend(
        self, query: Tensor, kv_cache: KVCache, layer: int, window: int | None, plan: BatchInputs
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(kv_cache, NativeKVCache)
        assert query.stride()[1:] == (self._head_dim, 1)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        out[plan.num_tokens :] = 0
        keys, values = kv_cache.addresses[layer]
        tables = plan.block_tables
        self._attend(
            self._instruction_set,
            query.dtype is torch.bfloat16,
            torch.get_num_threads(),
            tables.shape[0],
            plan.query_start_loc.ctypes.data,
            plan.starts.ctypes.data,
            tables.ctypes.data,
            tables.shape[1],
            self._num_kv_heads,
            self._group,
            self._head_dim,
            window or 0,
            self._scale,
            self._softcap,
            query.data_ptr(),
            query.stride(0),
            keys,
            values,
            kv_cache.head_stride,
            out.data_ptr(),
        )
        return out
