"""Draws tokens on the device; one small copy comes back, for which the launch does not wait."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.sampling.rules import problem_of
from engine.scheduled_batch import SampledRow, SampledToken, SamplingRow
from engine.triton.sampling_batch import PackedRows, PreparedRow, RowPacker
from engine.triton.sampling_calls import sampling_calls
from engine.triton.to_device import FetchedTensor

if TYPE_CHECKING:  # GPU benchmarks have no grammars
    from engine.grammar.grammars import Grammars

_ERRORS = {
    -1: "its logits are not finite",
    -2: "ValueError: no token is left to draw, or an adjustment overflowed",
}
"""By the state that the kernels write in place of a token."""


class DeviceDraw:
    """An `engine.sampling.launched.LaunchedDraw`."""

    def __init__(
        self,
        token_ids: Tensor,
        rows: Sequence[SamplingRow],
        settled: dict[int, SampledRow],
        packed: PackedRows,
        fetched: FetchedTensor | None,
    ) -> None:
        self.token_ids = token_ids
        """[rows] int64 on the device: the first token of each row, 0 where there is none."""
        self._rows = rows
        self._settled = settled
        self._packed = packed
        self._fetched = fetched

    def result(self) -> list[SampledRow]:
        """Wait for the copy, then read it."""
        results = dict(self._settled)
        if self._fetched is not None:
            numbers = self._fetched.wait().numpy()
            drawn = zip(self._packed.draws[:, 0].tolist(), numbers, strict=True)
            for index, group in groupby(drawn, key=lambda pair: pair[0]):
                params = self._rows[index].params
                tokens: list[SampledToken] = []
                for _, words in group:
                    token_id = int(words[0])
                    if token_id < 0:
                        results[index] = SampledRow(error=_ERRORS[token_id])
                        break
                    if params.logprobs is None:
                        tokens.append(SampledToken(token_id))
                        continue
                    values = words.view("f4")
                    top = self._packed.top
                    ids = words[2 : 2 + params.logprobs].tolist()
                    best = values[2 + top : 2 + top + params.logprobs].tolist()
                    told = zip(ids, best, strict=True)
                    tokens.append(SampledToken(token_id, float(values[1]), tuple(told)))
                else:
                    results[index] = SampledRow(tuple(tokens))
        return [results[index] for index in range(len(self._rows))]


class DeviceSampler:
    """Turns logits on a device into tokens, as `engine.sampling.sampler.Sampler` does on the host.

    The noise has the same bits. Sums and exponentials differ in their last bits, so a token on the
    very edge of a nucleus may be in on one side only, and a race that two tokens finish within 1e-7
    may go either way. A row's result does not depend on its neighbours.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str,
        grammars: "Grammars | None" = None,
        *,
        chunk_size: int = 4096,
    ) -> None:
        """Without `grammars`, rows that have one fail.

        `chunk_size`: token ids a program, a power of two.
        """
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._grammars = grammars
        self._chunk_size = chunk_size
        self._packer = RowPacker(vocab_size, eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """See `engine.sampling.launched.RowSampler`; waits for the device."""
        return self.launch(logits, rows).result()

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> DeviceDraw:
        """Queue the draws of logits [len(rows), vocab_size], float32, bfloat16 or float16.

        Logits are not changed. Raises ValueError for another shape. What cannot be drawn gets an
        `error` in its row's result.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(
                f"logits have the shape {tuple(logits.shape)}, "
                f"expected ({len(rows)}, {self._vocab_size})"
            )
        settled: dict[int, SampledRow] = {}
        prepared: list[PreparedRow] = []
        for index, row in enumerate(rows):
            held = self._held_back(row)
            if held is None:
                try:
                    prepared.append(self._packer.prepare(index, row))
                except ValueError as error:
                    held = SampledRow(error=f"ValueError: {error}")
            if held is not None:
                settled[index] = held
        packed = self._packer.pack(len(rows), prepared)
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        fetched = None
        if len(packed.draws):
            out = logits.new_zeros(len(packed.draws), 2 + 2 * packed.top, dtype=torch.int32)
            for call in sampling_calls(out, token_ids, logits, packed, self._chunk_size):
                call.run()
            fetched = FetchedTensor(out)
        return DeviceDraw(token_ids, rows, settled, packed, fetched)

    def _held_back(self, row: SamplingRow) -> SampledRow | None:
        problem = problem_of(row.params)
        if problem is not None:
            return SampledRow(error=problem)
        if row.grammar is None:
            return None
        # Late: GPU benchmarks run where no library for grammars is installed.
        from engine.sampling.grammar_rows import follow_grammar

        return follow_grammar(self._grammars, row)
