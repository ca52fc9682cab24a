"""What the adapter slots hold for one projection of one layer."""

from collections.abc import Sequence
from itertools import accumulate

from lora_kernels.weights import LoraSlice, LoraWeights


class LoraTable:
    """The slots of one projection: written when an adapter comes or goes, read in each step.

    An adapter keeps its own tensors and a slot points to them, so a slot costs nothing by itself,
    an adapter costs its true rank, and what a slot held before cannot show through.
    """

    def __init__(self, in_features: int, slice_sizes: Sequence[int], num_slots: int) -> None:
        self.in_features = in_features
        self.slice_sizes = tuple(slice_sizes)
        self.slice_indptr = (0, *accumulate(slice_sizes))
        """Columns `slice_indptr[i]:slice_indptr[i + 1]` of the output belong to slice i."""
        self._slots: list[LoraWeights | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        """How many adapters there is room for."""
        return len(self._slots)

    @property
    def out_features(self) -> int:
        """Columns of the projection's output, all slices together."""
        return self.slice_indptr[-1]

    def install(self, slot: int, weights: LoraWeights | None) -> None:
        """Point a slot to weights; None where the adapter leaves this projection alone.

        Raises ValueError where the weights do not fit the projection; the slot is then unchanged.
        """
        if weights is not None:
            self._check(weights)
        self._slots[slot] = weights

    def clear(self, slot: int) -> None:
        """Forget a slot's weights."""
        self._slots[slot] = None

    def weights(self, slot: int) -> LoraWeights | None:
        """What a slot holds; None if its adapter, or no adapter, leaves this projection alone."""
        return self._slots[slot]

    def slice(self, slot: int, index: int) -> LoraSlice | None:
        """The weights of one slice of a slot."""
        weights = self._slots[slot]
        return None if weights is None else weights.slice(index)

    def _check(self, weights: LoraWeights) -> None:
        if weights.a.shape[1] != self.in_features:
            raise ValueError(
                f"A has {weights.a.shape[1]} columns, the projection {self.in_features} inputs"
            )
        if len(weights.b) != len(self.slice_sizes):
            raise ValueError(
                f"weights for {len(weights.b)} slices, the projection has {len(self.slice_sizes)}"
            )
        for index, (b, size) in enumerate(zip(weights.b, self.slice_sizes, strict=True)):
            if b is not None and b.shape[0] != size:
                raise ValueError(
                    f"slice {index}: B has {b.shape[0]} rows, the slice {size} outputs"
                )
