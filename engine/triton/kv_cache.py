"""Paged keys and values on a device, in the model's dtype or as 8-bit floats with a scale."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from engine.runner.kv_cache import KVCache, KVShape

FP8 = torch.float8_e4m3fn


class TritonKVCache(KVCache):
    """A `KVCache` in the same layout, for the kernels of this package.

    Blocks need not be cleared: the kernels never read past the end of a block's owner.
    """

    needs_clearing = False

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device | str) -> None:
        self.is_fp8 = shape.dtype is FP8
        if self.is_fp8:
            # As bytes: Triton has the type only on GPUs since compute capability 8.9.
            shape = replace(shape, dtype=torch.uint8)
        super().__init__(shape, num_blocks, device)
        num_layers, _, num_kv_heads = self._storage.shape[:3]
        self.scales = torch.ones(num_layers, 2, num_kv_heads, device=device)
        """[layer, keys or values, KV head] float32: what stored 8-bit numbers are multiplied by."""
        self._layers = [(part[0], part[1]) for part in self._storage.unbind(0)]
        self._layer_scales = list(self.scales.unbind(0))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """See `KVCache.layer`; an 8-bit cache returns its bytes."""
        return self._layers[index]

    def layer_scales(self, index: int) -> Tensor:
        """[2, num_kv_heads] float32, of a layer's keys and values."""
        return self._layer_scales[index]

    def set_scales(self, scales: Tensor) -> None:
        """Take calibrated scales [num_layers, 2, num_kv_heads]; before anything is stored.

        Raises ValueError for another shape, or for a scale that is no positive number.
        """
        if scales.shape != self.scales.shape:
            raise ValueError(
                f"KV scales have the shape {list(scales.shape)}, not {list(self.scales.shape)}"
            )
        if not bool((torch.isfinite(scales) & (scales > 0)).all()):
            raise ValueError("KV scales must be positive, finite numbers")
        self.scales.copy_(scales)

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `KVCache.write`; a token whose slot is negative is not stored."""
        # Late, so that whoever only allocates does not load Triton.
        from engine.triton.rotary import store_kv_call

        store_kv_call(self, layer, key, value, slot_mapping).run()

    def clear_blocks(self, blocks: Tensor) -> None:
        """Do nothing: blocks need not be cleared."""

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks, in order, in all layers; waits for nothing."""
        todo = list(pairs)
        if not todo:
            return
        if {source for source, _ in todo} & {destination for _, destination in todo}:
            super().copy_blocks(todo)  # one copy may read what another wrote
            return
        host = torch.tensor(todo, dtype=torch.int64)
        if self._storage.is_cuda:
            host = host.pin_memory()
        source, destination = host.to(self._storage.device, non_blocking=True).unbind(1)
        self._storage.index_copy_(3, destination, self._storage.index_select(3, source))
