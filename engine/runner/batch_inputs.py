"""A scheduled batch laid out ragged, as one forward pass reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.runner.padding import ROW_TILE, padded_rows
from engine.scheduled_batch import ScheduledRow
from lora_kernels import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch

IntArray = npt.NDArray[np.int64]
NO_BLOCK = -1
"""Fills block tables up to the length of the longest."""


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """All inputs of a forward pass. Rows are sorted by adapter slot, base rows first.

    The rows' tokens follow one another, `num_tokens` in all. Token tensors are padded to a multiple
    of `row_tile` with token 0 at position 0, which writes no K/V and belongs to no adapter.
    """

    num_tokens: int
    token_ids: Tensor
    """[padded] int64."""
    positions: Tensor
    """[padded] int64."""
    slot_mapping: Tensor
    """[num_tokens] int64: block * block_size + offset of each token's K/V."""
    fresh_blocks: Tensor
    """[num_fresh] int64: blocks whose first position is written in this step."""
    query_start_loc: IntArray
    """[num_rows + 1]: tokens `query_start_loc[i]:query_start_loc[i + 1]` are row i's."""
    starts: IntArray
    """[num_rows]: position of each row's first token."""
    block_tables: IntArray
    """[num_rows, longest], `NO_BLOCK` past a row's end."""
    lora: LoraBatch | DeviceLoraBatch
    logit_tokens: Tensor
    """[num_logits] int64: the last token of each row that samples."""
    logit_slots: tuple[int | None, ...]
    """For each logit, its row's adapter slot; ascending, base rows first."""
    logit_rows: tuple[int, ...]
    """For each logit, the row's index in the scheduled batch."""
    logit_lora: DeviceLoraBatch | None = None
    """On a device: `logit_slots` as kernels read them; None if every token has a logit."""


def build_batch_inputs(
    rows: Sequence[ScheduledRow], block_size: int, row_tile: int = ROW_TILE
) -> BatchInputs:
    """Lay out rows, of which there is at least one, each with at least one token."""
    order = sorted(range(len(rows)), key=lambda i: -1 if (s := rows[i].slot) is None else s)
    ordered = [rows[i] for i in order]
    lengths = np.array([len(row.token_ids) for row in ordered], dtype=np.int64)
    starts = np.array([row.start for row in ordered], dtype=np.int64)
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1])
    padded = padded_rows(num_tokens, row_tile)

    token_ids = np.zeros(padded, dtype=np.int64)
    token_ids[:num_tokens] = np.fromiter(
        chain.from_iterable(row.token_ids for row in ordered), np.int64, num_tokens
    )
    row_of_token = np.repeat(np.arange(len(ordered)), lengths)
    positions = np.zeros(padded, dtype=np.int64)
    positions[:num_tokens] = np.arange(num_tokens) + (starts - (ends - lengths))[row_of_token]
    block_tables = _block_tables(ordered)
    used = positions[:num_tokens]
    blocks = block_tables[row_of_token, used // block_size]
    samples = [i for i, row in enumerate(ordered) if row.sampling is not None]
    return BatchInputs(
        num_tokens=num_tokens,
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(blocks * block_size + used % block_size),
        fresh_blocks=torch.from_numpy(blocks[used % block_size == 0]),
        query_start_loc=np.concatenate((np.zeros(1, np.int64), ends)),
        starts=starts,
        block_tables=block_tables,
        lora=LoraBatch.from_runs([row.slot for row in ordered], lengths.tolist()),
        logit_tokens=torch.from_numpy(ends[samples] - 1),
        logit_slots=tuple(ordered[i].slot for i in samples),
        logit_rows=tuple(order[i] for i in samples),
    )


def _block_tables(rows: Sequence[ScheduledRow]) -> IntArray:
    tables = np.full((len(rows), max(len(row.block_table) for row in rows)), NO_BLOCK, np.int64)
    for i, row in enumerate(rows):
        tables[i, : len(row.block_table)] = row.block_table
    return tables
