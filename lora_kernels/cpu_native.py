"""The compiled CPU path: one call does all segments and slices of a projection."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lora_kernels.batch import LoraBatch
from lora_kernels.native_library import NativeLibrary
from lora_kernels.packed import PackedWeights
from lora_kernels.table import SlotTable, SlotWeights


class NativeLoraTable(SlotTable[PackedWeights]):
    """`LoraTable` for the compiled kernel; keeps the addresses and sizes that the kernel reads."""

    def __init__(
        self,
        library: NativeLibrary,
        instruction_set: str,
        in_features: int,
        slice_sizes: Sequence[int],
        num_slots: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(PackedWeights, in_features, slice_sizes, num_slots)
        self.dtype = dtype
        self._add_lora = library.add_lora
        self._instruction_set = library.instruction_sets[instruction_set]
        num_slices = len(self.slice_sizes)
        header = [in_features, num_slices, int(dtype is torch.bfloat16), *self.slice_indptr]
        record_words = 3 * (1 + num_slices)
        self._words = np.zeros(len(header) + num_slots * record_words, dtype=np.int64)
        self._words[: len(header)] = header
        self._records = self._words[len(header) :].reshape(num_slots, record_words)
        self._out_features = self.out_features
        self._address: int = self._words.ctypes.data

    def install(self, slot: int, weights: SlotWeights | None) -> None:
        """Point a slot to weights; see `SlotTable.install`."""
        super().install(slot, weights)
        packed = self.weights(slot)
        self._records[slot] = 0 if packed is None else packed.record

    def clear(self, slot: int) -> None:
        """Forget a slot's weights."""
        self.install(slot, None)

    def _checked(self, weights: SlotWeights) -> PackedWeights:
        packed = super()._checked(weights)
        if packed.dtype is not self.dtype:
            raise ValueError(f"weights are {packed.dtype}, the table is for {self.dtype}")
        return packed

    def accepts(self, y: Tensor, x: Tensor, batch: LoraBatch) -> bool:
        """Whether the kernel can take these operands: the fewest checks that make it safe."""
        dtype, shape = self.dtype, x.shape
        return (
            x.dtype is dtype
            and y.dtype is dtype
            and len(shape) == 2
            and shape[1] == self.in_features
            and y.shape == (shape[0], self._out_features)
            and shape[0] >= batch.num_rows
            and batch.max_slot < len(self._slots)
            and x.is_cpu
            and y.is_cpu
            and x.stride(1) == 1
            and y.stride(1) == 1
        )

    def add(self, y: Tensor, x: Tensor, batch: LoraBatch) -> None:
        """Do what `lora_kernels.add_lora` does, with operands that the table `accepts`."""
        failed = self._add_lora(
            self._instruction_set,
            y.data_ptr(),
            y.stride(0),
            x.data_ptr(),
            x.stride(0),
            self._address,
            batch.address,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the shrunk rows of {batch.num_rows} rows")
