"""A start-up check, on the loaded model, that tokens do not depend on what shares their batch.

Libraries choose GEMM kernels by machine, so batch invariance cannot be proved once and for all. A
short sequence is run whole and alone, and again in pieces beside a neighbour. Its keys, values and
logits must be bit-equal.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.runner.attention import AttentionBackend
from engine.runner.batch_inputs import build_batch_inputs
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow, ScheduledRow

NUM_POSITIONS = 70
"""Length of the sequence: past the first KV tile. The rotary table must reach that far."""
_CUTS = (0, 17, 18, 66, NUM_POSITIONS)
"""Where the second run is cut: a chunk, a single token, a chunk, a chunk over the tile's edge."""
_NEIGHBOUR = 5
_SAMPLING = SamplingParams(max_tokens=1, seed=0)


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """What the check found."""

    max_logit_difference: float
    max_kv_difference: float

    @property
    def holds(self) -> bool:
        """Whether everything was bit-equal."""
        return self.max_logit_difference == 0 and self.max_kv_difference == 0


@torch.inference_mode()
def check_batch_invariance(decoder: Decoder, attention: AttentionBackend) -> InvarianceReport:
    """Run the check with a small KV cache of its own."""
    vocab_size = decoder.config.vocab_size
    token_ids = [7919 * (i + 1) % vocab_size for i in range(NUM_POSITIONS)]
    alone = _Run(decoder, attention)
    alone.step([(0, token_ids, 0)])
    crowd = _Run(decoder, attention)
    for step, (begin, end) in enumerate(pairwise(_CUTS)):
        neighbour = [(step * _NEIGHBOUR + i) % vocab_size for i in range(_NEIGHBOUR)]
        crowd.step([(1, neighbour, step * _NEIGHBOUR), (0, token_ids[begin:end], begin)])
    return InvarianceReport(
        max_logit_difference=_difference(alone.logits[0], crowd.logits[0]),
        max_kv_difference=_difference(alone.kv(0), crowd.kv(0)),
    )


class _Run:
    """Two sequences, each with its own half of a small KV cache."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention
        self._blocks_each = -(-NUM_POSITIONS // 16)
        shape = decoder.config.kv_shape(16, decoder.dtype)
        self._cache = decoder.ops.make_kv_cache(shape, 2 * self._blocks_each)
        self._cache.clear_blocks(torch.arange(self._cache.num_blocks))
        self.logits: dict[int, Tensor] = {}

    def step(self, rows: list[tuple[int, list[int], int]]) -> None:
        """Run (sequence, token ids, start) rows."""
        scheduled = [
            ScheduledRow(
                sequence_id=sequence,
                token_ids=token_ids,
                start=start,
                block_table=self._table(sequence),
                slot=None,
                sampling=SamplingRow(_SAMPLING, (0,), token_ids, len(token_ids)),
            )
            for sequence, token_ids, start in rows
        ]
        inputs = build_batch_inputs(scheduled, self._cache.block_size, self._decoder.row_tile)
        logits = self._decoder.forward(inputs, self._cache, self._attention)
        for index, row in enumerate(inputs.logit_rows):
            self.logits[scheduled[row].sequence_id] = logits[index]

    def kv(self, sequence: int) -> Tensor:
        """All keys and values of a sequence."""
        table = torch.tensor(self._table(sequence))
        parts: list[Tensor] = []
        for layer in range(self._decoder.config.num_layers):
            for cache in self._cache.layer(layer):
                parts.append(cache.index_select(1, table).flatten(1, 2)[:, :NUM_POSITIONS])
        return torch.stack(parts)

    def _table(self, sequence: int) -> list[int]:
        return list(range(sequence * self._blocks_each, (sequence + 1) * self._blocks_each))


def _difference(left: Tensor, right: Tensor) -> float:
    if torch.equal(left, right):
        return 0.0
    difference = (left.float() - right.float()).abs().max().item()
    # The tensors differ; where the difference is 0 or NaN (-0 and 0, NaN), no number tells by how
    # much.
    return difference if difference > 0 else float("nan")
