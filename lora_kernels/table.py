"""What the adapter slots hold for one projection of one layer."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from lora_kernels.weights import LoraSlice, LoraWeights


class SlotWeights(Protocol):
    """One adapter's weights for one projection, however a path lays them out."""

    @property
    def in_features(self) -> int:
        """Inputs of the projection."""
        ...

    @property
    def slice_sizes(self) -> tuple[int | None, ...]:
        """Outputs of each slice; None where the adapter has no weights."""
        ...

    def slice(self, index: int) -> LoraSlice | None:
        """The weights of one slice."""
        ...


Weights = TypeVar("Weights", bound=SlotWeights)


class SlotTable(Generic[Weights]):
    """The slots of one projection: written when an adapter comes or goes, read in each step.

    Slots only point to the adapters' own tensors. So an empty slot costs nothing, an adapter costs
    its true rank, and weights that a slot held before can never be used by mistake.
    """

    def __init__(
        self, kind: type[Weights], in_features: int, slice_sizes: Sequence[int], num_slots: int
    ) -> None:
        self.in_features = in_features
        self.slice_sizes = tuple(slice_sizes)
        self.slice_indptr = (0, *accumulate(slice_sizes))
        """Columns `slice_indptr[i]:slice_indptr[i + 1]` of the output belong to slice i."""
        self._kind = kind
        self._slots: list[Weights | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        """How many adapters there is room for."""
        return len(self._slots)

    @property
    def out_features(self) -> int:
        """Columns of the projection's output, all slices together."""
        return self.slice_indptr[-1]

    def install(self, slot: int, weights: SlotWeights | None) -> None:
        """Point a slot to weights; None where the adapter leaves this projection alone.

        Raises ValueError where the weights do not fit the projection, or were fused for another
        kind of table; the slot is then unchanged.
        """
        self._slots[slot] = None if weights is None else self._checked(weights)

    def clear(self, slot: int) -> None:
        """Forget a slot's weights."""
        self._slots[slot] = None

    def weights(self, slot: int) -> Weights | None:
        """What a slot holds; None if it is empty, or its adapter leaves this projection alone."""
        return self._slots[slot]

    def slice(self, slot: int, index: int) -> LoraSlice | None:
        """The weights of one slice of a slot."""
        weights = self._slots[slot]
        return None if weights is None else weights.slice(index)

    def _checked(self, weights: SlotWeights) -> Weights:
        if not isinstance(weights, self._kind):
            raise ValueError(
                f"a table of {self._kind.__name__} cannot take {type(weights).__name__}"
            )
        if weights.in_features != self.in_features:
            raise ValueError(
                f"A has {weights.in_features} columns, the projection {self.in_features} inputs"
            )
        if len(weights.slice_sizes) != len(self.slice_sizes):
            raise ValueError(
                f"weights for {len(weights.slice_sizes)} slices, the projection has "
                f"{len(self.slice_sizes)}"
            )
        for index, (rows, size) in enumerate(
            zip(weights.slice_sizes, self.slice_sizes, strict=True)
        ):
            if rows is not None and rows != size:
                raise ValueError(f"slice {index}: B has {rows} rows, the slice {size} outputs")
        return weights


class LoraTable(SlotTable[LoraWeights]):
    """The slots that the PyTorch path reads."""

    def __init__(self, in_features: int, slice_sizes: Sequence[int], num_slots: int) -> None:
        super().__init__(LoraWeights, in_features, slice_sizes, num_slots)
