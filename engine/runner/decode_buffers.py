"""The inputs of a decode step of one size, in tensors that keep their addresses.

Rows past those of the step are *padding*: each is an ordinary row with one token at position 0, on
a block that no sequence owns. So no kernel needs to know about them, and nobody reads what they
write.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.device.device import Device
from engine.runner.batch_inputs import NO_BLOCK, BatchInputs
from engine.runner.padding import padded_rows
from engine.scheduled_batch import ScheduledRow
from lora_kernels import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch


def decode_buffer_bytes(size: int, row_tile: int) -> int:
    """Bytes of device memory that `DecodeBuffers` allocate themselves."""
    return 8 * (2 * padded_rows(size, row_tile) + 2 * size)


class DecodeBuffers:
    """Room for `size` rows, filled anew in each step."""

    def __init__(
        self,
        size: int,
        *,
        max_blocks: int,
        padding_block: int,
        block_size: int,
        row_tile: int,
        device: Device,
        lora: DeviceLoraBatch | None = None,
    ) -> None:
        """Allocate, with padding in all rows.

        Args:
            size: rows of a step.
            max_blocks: length of a row's block table.
            padding_block: a block of the cache that no sequence owns.
            block_size: positions of a block.
            row_tile: token tensors are padded to a multiple of it, as in `BatchInputs`.
            device: where the token tensors are.
            lora: on a device, the static batch that adapters are applied by.

        """
        self.size = size
        self.max_blocks = max_blocks
        self.num_rows = 0
        """Rows of the current step."""
        self._padding_block = padding_block
        self._block_size = block_size
        self._device = device
        self.lora = lora
        self._no_adapters = LoraBatch.from_runs([], [])
        padded = padded_rows(size, row_tile)
        # One array, so that a step needs one copy: token ids, positions, K/V slots.
        self._host = np.zeros(2 * padded + size, dtype=np.int64)
        self._token_ids = self._host[:padded]
        self._positions = self._host[padded : 2 * padded]
        self._slots = self._host[2 * padded :]
        self._starts = self._positions[:size]
        self._tables = np.full((size, max_blocks), NO_BLOCK, dtype=np.int64)
        self._tables[:, 0] = padding_block
        self._slots[:] = padding_block * block_size
        self._lengths = [1] * size
        """Blocks in each row of `_tables`."""
        self._tensors = torch.zeros(len(self._host), dtype=torch.int64, device=device.torch_device)
        self.token_ids = self._tensors[:padded]
        """[padded] int64, on the device: written by `fill`, or by whoever has drawn them there."""
        self.inputs = BatchInputs(
            num_tokens=size,
            token_ids=self.token_ids,
            positions=self._tensors[padded : 2 * padded],
            slot_mapping=self._tensors[2 * padded :],
            fresh_blocks=torch.zeros(0, dtype=torch.int64),
            query_start_loc=np.arange(size + 1),
            starts=self._starts,
            block_tables=self._tables,
            lora=self._no_adapters,
            logit_tokens=torch.arange(size, device=device.torch_device),
            logit_slots=(None,) * size,
            logit_rows=(),
        )
        """What the forward pass reads; after `fill`, that of the current step."""
        device.put(self._tensors, self._host)

    def fill(self, rows: Sequence[ScheduledRow]) -> tuple[int, ...]:
        """Take a step's rows, one token each, no more than `size`.

        Returns their order in the buffers: sorted by adapter slot, base rows first.
        """
        order = sorted(range(len(rows)), key=lambda i: -1 if (s := rows[i].slot) is None else s)
        block_size, tables, lengths = self._block_size, self._tables, self._lengths
        blocks: list[int] = []
        for place, index in enumerate(order):
            table = rows[index].block_table
            length = len(table)
            tables[place, :length] = table
            if length < lengths[place]:
                tables[place, length : lengths[place]] = NO_BLOCK
            lengths[place] = length
            blocks.append(table[-1])
        count = len(order)
        self._token_ids[:count] = [rows[index].token_ids[0] for index in order]
        self._starts[:count] = [rows[index].start for index in order]
        offsets = self._starts[:count] % block_size
        fresh = np.array(blocks)
        self._slots[:count] = fresh * block_size + offsets
        if count < self.num_rows:
            self._pad(count, self.num_rows)
        self.num_rows = count
        slots = [rows[index].slot for index in order]
        self.inputs = replace(
            self.inputs,
            fresh_blocks=torch.from_numpy(fresh[offsets == 0]),
            lora=self._apply(slots),
        )
        self._device.put(self._tensors, self._host)
        return tuple(order)

    def _apply(self, slots: Sequence[int | None]) -> "LoraBatch | DeviceLoraBatch":
        if slots[-1] is None:  # sorted: then none has one
            return self._no_adapters
        batch = LoraBatch.from_runs(slots, [1] * len(slots))
        if self.lora is None:
            return batch
        self.lora.update(batch)
        return self.lora

    def _pad(self, begin: int, end: int) -> None:
        self._token_ids[begin:end] = 0
        self._starts[begin:end] = 0
        self._slots[begin:end] = self._padding_block * self._block_size
        self._tables[begin:end] = NO_BLOCK
        self._tables[begin:end, 0] = self._padding_block
        self._lengths[begin:end] = [1] * (end - begin)
