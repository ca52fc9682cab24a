"""A step's sampling rows, packed on the host for the kernels of `sampling_kernels`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.sampling.adjustment_entries import Entries, adjustment_entries
from engine.sampling.noise import stream_key
from engine.sampling.rules import has_nucleus, is_greedy
from engine.scheduled_batch import SamplingRow

ROW_FIELDS = 12
DRAW_FIELDS = 4
IS_GREEDY, HAS_SCORES, HAS_NUCLEUS, HAS_LOGPROBS = 1, 2, 4, 8
"""As in `sampling_kernels`."""

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What the kernels read; each array of int32."""

    rows: Words
    """[rows, ROW_FIELDS]."""
    draws: Words
    """[draws, DRAW_FIELDS]; a row's draws are adjacent, in the order of its choices."""
    listed: Words
    """[listed rows]: indices of rows whose most likely tokens are reported."""
    entries: Entries
    masks: Words
    """[masks, words of 32 bits]."""
    top: int
    """Most likely tokens to find: a power of two, or 0."""


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can be drawn, as far as is known without its logits."""

    index: int
    row: SamplingRow
    entries: Entries | None
    mask: Words | None


class RowPacker:
    """Packs rows of one vocabulary."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self.words = -(-vocab_size // 32)
        """32-bit words of a mask."""

    def prepare(self, index: int, row: SamplingRow) -> PreparedRow:
        """Prepare row number `index`; raises ValueError if what it asks for is impossible."""
        mask = None if row.grammar is None else row.grammar.mask
        return PreparedRow(
            index,
            row,
            adjustment_entries(row, self._eos_token_ids, self._vocab_size),
            None if mask is None else self._pack_mask(mask),
        )

    def pack(self, num_rows: int, prepared: Sequence[PreparedRow]) -> PackedRows:
        """Pack those of `num_rows` rows of logits that can be drawn."""
        rows = np.zeros((num_rows, ROW_FIELDS), dtype=np.int32)
        rows[:, 0], rows[:, 10:] = IS_GREEDY, -1
        floats = rows.view(np.float32)
        entries: list[Entries] = []
        masks: list[Words] = []
        listed: list[int] = []
        draws: list[tuple[int, int, int]] = []
        num_entries, top = 0, 0
        for one in prepared:
            params, index = one.row.params, one.index
            greedy = is_greedy(params)
            narrow = not greedy and has_nucleus(params, self._vocab_size)
            record, numbers = rows[index], floats[index]
            if one.entries is not None:
                record[5:7] = num_entries, num_entries + len(one.entries)
                num_entries += len(one.entries)
                entries.append(one.entries)
            if one.mask is not None:
                record[10] = len(masks)
                masks.append(one.mask)
            if params.logprobs:
                record[11] = len(listed)
                listed.append(index)
                top = max(top, 1 << (min(params.logprobs, self._vocab_size) - 1).bit_length())
            is_adjusted = one.entries is not None or one.mask is not None
            record[0] = (
                IS_GREEDY * greedy
                + HAS_SCORES * (narrow or is_adjusted)
                + HAS_NUCLEUS * narrow
                + HAS_LOGPROBS * (params.logprobs is not None)
            )
            numbers[1] = 1.0 if greedy else 1.0 / params.temperature
            record[2] = min(params.top_k, self._vocab_size)
            numbers[3] = params.top_p
            numbers[4] = max(-math.log(params.min_p), 0.0) if params.min_p > 0 else math.inf
            numbers[7:10] = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            draws.extend(
                (index, place == 0, stream_key(params.seed, choice, one.row.output_position))
                for place, choice in enumerate(one.row.choices)
            )
        return PackedRows(
            rows=rows,
            draws=_pack_draws(draws),
            listed=np.array(listed, dtype=np.int32),
            entries=np.concatenate(entries) if entries else np.empty((0, 3), np.int32),
            masks=np.stack(masks) if masks else np.empty((0, self.words), np.int32),
            top=top,
        )

    def _pack_mask(self, mask: npt.NDArray[np.bool_]) -> Words:
        packed = np.zeros(4 * self.words, dtype=np.uint8)
        bits = np.packbits(mask[: self._vocab_size], bitorder="little")
        packed[: len(bits)] = bits
        return packed.view("<i4").astype(np.int32)


def _pack_draws(draws: Sequence[tuple[int, int, int]]) -> Words:
    packed = np.zeros((len(draws), DRAW_FIELDS), dtype=np.int32)
    if draws:
        indices, is_first, keys = zip(*draws, strict=True)
        packed[:, 0], packed[:, 1] = indices, is_first
        packed[:, 2:] = np.array(keys, dtype="<u8").view("<i4").reshape(-1, 2)
    return packed
