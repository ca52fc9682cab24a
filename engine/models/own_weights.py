"""Weights that replace the base's for one adapter: norms, the embedding, the output layer.

These are PEFT's `modules_to_save`. Few adapters have them, so this is plain PyTorch: the base's
operations compute all rows first, then the rows of such adapters are computed again and replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from engine.ops import DecoderOps
from engine.runner.padding import ROW_TILE, padded_rows
from lora_kernels import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch


class NormPlace(NamedTuple):
    """A norm of the residual stream: layer and field of `DecoderLayer`, or `FINAL_NORM`."""

    layer: int
    name: str


FINAL_NORM = NormPlace(-1, "norm")


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """One adapter's whole weights, in the model's dtype."""

    norms: Mapping[str, Tensor] = field(default_factory=dict[Any, Any])
    """[hidden_size] each, by Hugging Face's path of the norm."""
    embedding: Tensor | None = None
    """[vocab_size, hidden_size]"""
    output_layer: Tensor | None = None
    """[vocab_size, hidden_size]"""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ends = [end for end in (self.embedding, self.output_layer) if end is not None]
        return sum(tensor.nbytes for tensor in (*self.norms.values(), *ends))


class _Held(NamedTuple):
    norms: Mapping[NormPlace, Tensor]
    embedding: Tensor | None
    output_layer: Tensor | None


class OwnRows:
    """The rows of one batch whose adapters have own weights; every method changes only those.

    Rows are computed one by one, or in GEMMs of a multiple of ROW_TILE rows, so that a row's bits
    do not depend on its neighbours.
    """

    def __init__(self, parts: list[tuple[Tensor, _Held]], ops: DecoderOps, eps: float) -> None:
        self._parts = parts
        self._ops = ops
        self._eps = eps

    def embed_(self, x: Tensor, token_ids: Tensor) -> None:
        """Look up the embeddings of the rows' `token_ids` [rows]; x is [rows, hidden_size]."""
        for rows, held in self._parts:
            if held.embedding is not None:
                found = F.embedding(token_ids.index_select(0, rows), held.embedding)
                x.index_copy_(0, rows, found)

    def norm_(self, normed: Tensor, x: Tensor, place: NormPlace) -> None:
        """Norm the rows of x; both are [rows, hidden_size]."""
        for rows, held in self._parts:
            weight = held.norms.get(place)
            if weight is not None:
                normed.index_copy_(
                    0, rows, self._ops.norm(x.index_select(0, rows), weight, self._eps)
                )

    def project_(self, logits: Tensor, x: Tensor) -> None:
        """Compute the rows' logits [rows, vocab_size] from x [rows, hidden_size]."""
        for rows, held in self._parts:
            if held.output_layer is not None:
                count = rows.shape[0]
                padded = x.new_zeros(padded_rows(count, ROW_TILE), x.shape[1])
                padded[:count] = x.index_select(0, rows)
                logits.index_copy_(0, rows, F.linear(padded, held.output_layer)[:count])


class OwnWeightsTable:
    """The slots of a decoder: written when an adapter comes or goes, read in each step."""

    def __init__(
        self,
        places: Mapping[str, NormPlace],
        *,
        vocab_size: int,
        hidden_size: int,
        unit_offset_norms: bool,
        num_slots: int,
    ) -> None:
        """`places` are the decoder's norms by Hugging Face's path."""
        self.is_used = False
        """Whether any slot holds something."""
        self._places = places
        self._sizes = vocab_size, hidden_size
        self._unit_offset_norms = unit_offset_norms
        self._slots: list[_Held | None] = [None] * num_slots

    def install(self, slot: int, weights: OwnWeights | None) -> None:
        """Point a slot to an adapter's weights, or to none.

        Raises ValueError where they do not fit the decoder; the slot is then unchanged.
        """
        self._slots[slot] = None if weights is None else self._checked(weights)
        self.is_used = any(held is not None for held in self._slots)

    def rows(
        self, batch: LoraBatch | DeviceLoraBatch, ops: DecoderOps, eps: float
    ) -> OwnRows | None:
        """The rows of a batch that have own weights; None if there are none."""
        parts: list[tuple[Tensor, _Held]] = []
        for segment, slot in enumerate(batch.segment_slot):
            held = self._slots[slot]
            begin, end = batch.segment_indptr[segment : segment + 2]
            if held is not None and begin != end:
                parts.append((batch.permutation[begin:end].long(), held))
        return OwnRows(parts, ops, eps) if parts else None

    def _checked(self, weights: OwnWeights) -> _Held:
        norms: dict[NormPlace, Tensor] = {}
        for path, weight in weights.norms.items():
            if path not in self._places or weight.shape != self._sizes[1:]:
                raise ValueError(f"'{path}' of {list(weight.shape)} is no norm of the decoder")
            # As the decoder holds the base's.
            norms[self._places[path]] = weight.float() + 1.0 if self._unit_offset_norms else weight
        for end in (weights.embedding, weights.output_layer):
            if end is not None and end.shape != self._sizes:
                raise ValueError(f"{list(end.shape)} for a vocabulary of {list(self._sizes)}")
        return _Held(norms, weights.embedding, weights.output_layer)
