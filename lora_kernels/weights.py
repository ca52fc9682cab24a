"""One adapter's weights for one projection, fused so that its slices share a shrink."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One adapter's weights for one slice of a projection (q, or k, or v of a fused q/k/v)."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[slice_features, rank]"""
    scaling: float

    @property
    def rank(self) -> int:
        """Rows of `a`; 0 is allowed and adds nothing."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One adapter's weights for all slices of a projection; made by `fuse`.

    The slices' A are stacked, so that one GEMM shrinks for all of them. Everything is float32 with
    values rounded to the model's dtype: CPU GEMMs then accumulate in, and return, float32.
    """

    a: Tensor
    """[total_rank, in_features] float32."""
    b: tuple[Tensor | None, ...]
    """For each slice [slice_features, rank] float32; None where the adapter has no weights."""
    rank_indptr: tuple[int, ...]
    """Rows `rank_indptr[i]:rank_indptr[i + 1]` of `a` belong to slice i."""
    scalings: tuple[float, ...]
    """For each slice; 0.0 where the adapter has no weights."""
    row_scaling: Tensor
    """[total_rank] float32: `scalings` repeated over the rows of `a`."""

    @staticmethod
    def fuse(slices: Sequence[LoraSlice | None], dtype: torch.dtype) -> "LoraWeights":
        """Stack slices, of which at least one is present; values are rounded to `dtype`.

        Raises ValueError where shapes of A and B do not agree.
        """
        check_shapes(slices)
        present = [part for part in slices if part is not None]
        indptr = [0]
        for part in slices:
            indptr.append(indptr[-1] + (part.rank if part is not None else 0))
        ranks = torch.tensor([part.rank for part in present])
        scalings = torch.tensor([part.scaling for part in present], dtype=torch.float32)
        return LoraWeights(
            a=torch.cat([_rounded(part.a, dtype) for part in present]),
            b=tuple(None if part is None else _rounded(part.b, dtype) for part in slices),
            rank_indptr=tuple(indptr),
            scalings=tuple(0.0 if part is None else part.scaling for part in slices),
            row_scaling=scalings.repeat_interleave(ranks),
        )

    @property
    def in_features(self) -> int:
        """Columns of A."""
        return self.a.shape[1]

    @property
    def slice_sizes(self) -> tuple[int | None, ...]:
        """Outputs of each slice; None where the adapter has no weights."""
        return tuple(None if b is None else b.shape[0] for b in self.b)

    def slice(self, index: int) -> LoraSlice | None:
        """The weights of one slice, as views."""
        b = self.b[index]
        if b is None:
            return None
        start, stop = self.rank_indptr[index : index + 2]
        return LoraSlice(self.a[start:stop], b, self.scalings[index])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [self.a, self.row_scaling, *(b for b in self.b if b is not None)]
        return sum(tensor.nbytes for tensor in tensors)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(torch.float32).contiguous()


def check_shapes(slices: Sequence[LoraSlice | None]) -> int:
    """The slices' in_features; raises ValueError where shapes do not agree or no slice is there."""
    in_features: int | None = None
    for index, part in enumerate(slices):
        if part is None:
            continue
        if part.a.dim() != 2 or part.b.dim() != 2 or part.b.shape[1] != part.rank:
            raise ValueError(
                f"slice {index}: A {list(part.a.shape)} and B {list(part.b.shape)} are not "
                "[rank, in] and [out, rank]"
            )
        in_features = part.a.shape[1] if in_features is None else in_features
        if part.a.shape[1] != in_features:
            raise ValueError(
                f"slice {index}: A has {part.a.shape[1]} columns where its neighbour has "
                f"{in_features}"
            )
    if in_features is None:
        raise ValueError("no slice is present: there are no weights to fuse")
    return in_features
