"""Low-rank updates of an embedding: a token's column of A takes the place of x Aᵀ.

Few adapters have one, so this is plain PyTorch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_kernels.batch import LoraBatch
from lora_kernels.cpu import ROW_TILE
from lora_kernels.device_batch import DeviceLoraBatch


@dataclass(frozen=True, slots=True)
class EmbeddingLora:
    """One adapter's update of the embedding: ``scaling * A[:, token] @ Bᵀ``.

    Both are float32, with values rounded to the model's dtype.
    """

    a: Tensor
    """[vocab_size, rank]: A transposed, so that a token's values are adjacent."""
    b: Tensor
    """[hidden_size, rank]"""
    scaling: float

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.a.nbytes + self.b.nbytes


class EmbeddingTable:
    """The slots of the embedding: written when an adapter comes or goes, read in each step."""

    def __init__(self, vocab_size: int, hidden_size: int, num_slots: int) -> None:
        self.is_used = False
        """Whether any slot holds something."""
        self._sizes = vocab_size, hidden_size
        self._slots: list[EmbeddingLora | None] = [None] * num_slots

    def install(self, slot: int, weights: EmbeddingLora | None) -> None:
        """Point a slot to an adapter's weights, or to none.

        Raises ValueError where they do not fit the embedding; the slot is then unchanged.
        """
        if weights is not None and (weights.a.shape[0], weights.b.shape[0]) != self._sizes:
            raise ValueError(
                f"A of {weights.a.shape[0]} tokens and B of {weights.b.shape[0]} outputs for "
                f"an embedding of {self._sizes}"
            )
        self._slots[slot] = weights
        self.is_used = any(held is not None for held in self._slots)

    def add_(self, x: Tensor, token_ids: Tensor, batch: LoraBatch | DeviceLoraBatch) -> None:
        """Add to x [rows, hidden_size], in place, each row's update for its token.

        `token_ids` is [rows] int64. Accumulates in float32, in GEMMs of a multiple of ROW_TILE
        rows: a row's bits do not depend on its neighbours.
        """
        for segment, slot in enumerate(batch.segment_slot):
            weights = self._slots[slot]
            begin, end = batch.segment_indptr[segment : segment + 2]
            if weights is None or begin == end:
                continue
            rows = batch.permutation[begin:end].long()
            count = end - begin
            shrunk = weights.a.new_zeros(-(-count // ROW_TILE) * ROW_TILE, weights.a.shape[1])
            shrunk[:count] = weights.a.index_select(0, token_ids.index_select(0, rows))
            update = torch.mm(shrunk.mul_(weights.scaling), weights.b.T)[:count]
            x.index_copy_(0, rows, update.add_(x.index_select(0, rows)).to(x.dtype))
