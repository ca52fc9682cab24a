"""Launches that draw a step's tokens; see `sampling_kernels`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.triton.sampling_batch import HAS_SCORES, IS_GREEDY, PackedRows
from engine.triton.sampling_kernels import (
    best_kernel,
    finish_kernel,
    limit_kernel,
    race_kernel,
    score_kernel,
)
from engine.triton.to_device import to_device
from lora_kernels.kernel_call import KernelCall

_LIMIT_BLOCK = 4096
_ENTRY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class _Work:
    """A step's rows on the device, and what its kernels leave for one another."""

    logits: Tensor
    """[rows, vocab]"""
    packed: PackedRows
    rows: Tensor
    draws: Tensor
    listed: Tensor
    entries: Tensor
    masks: Tensor
    """Of `packed`, copied."""
    scores: Tensor
    """[rows, vocab] float32; a single row if no row has scores of its own."""
    stats: Tensor
    """[rows, chunks, 3] float32."""
    best_ids: Tensor
    """[rows, chunks] int32."""
    found: Tensor
    """[rows, 3] float32."""
    states: Tensor
    """[rows, 2] int32."""
    times: Tensor
    """[draws, chunks] float32."""
    drawn_ids: Tensor
    """[draws, chunks] int32."""
    values: Tensor
    """[listed, chunks, top] float32."""
    value_ids: Tensor
    """[listed, chunks, top] int32."""
    chunk_size: int
    """Token ids a program."""

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def num_chunks(self) -> int:
        return self.best_ids.shape[1]

    @property
    def block_chunks(self) -> int:
        """Chunks as one block holds them: a power of two."""
        return max(2, 1 << (self.num_chunks - 1).bit_length())

    @property
    def num_warps(self) -> int:
        """Warps for a chunk: 16 elements a thread."""
        return max(1, min(8, self.chunk_size // 512))

    @staticmethod
    def of(logits: Tensor, packed: PackedRows, chunk_size: int) -> "_Work":
        (num_rows, vocab), device = logits.shape, logits.device
        num_draws, num_listed, top = len(packed.draws), max(len(packed.listed), 1), packed.top
        chunks = -(-vocab // chunk_size)
        rows, draws, listed, entries, masks = _copied(packed, device)

        def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        has_scores = bool((packed.rows[:, 0] & HAS_SCORES).any())
        return _Work(
            logits=logits,
            packed=packed,
            rows=rows,
            draws=draws,
            listed=listed,
            entries=entries,
            masks=masks,
            scores=scratch(num_rows if has_scores else 1, vocab),
            stats=scratch(num_rows, chunks, 3),
            best_ids=scratch(num_rows, chunks, dtype=torch.int32),
            found=scratch(num_rows, 3),
            states=scratch(num_rows, 2, dtype=torch.int32),
            times=scratch(num_draws, chunks),
            drawn_ids=scratch(num_draws, chunks, dtype=torch.int32),
            values=scratch(num_listed, chunks, max(top, 1)),
            value_ids=scratch(num_listed, chunks, max(top, 1), dtype=torch.int32),
            chunk_size=chunk_size,
        )


def sampling_calls(
    out: Tensor, token_ids: Tensor, logits: Tensor, packed: PackedRows, chunk_size: int
) -> Iterator[KernelCall]:
    """The launches, in their order.

    Args:
        out: [draws, 2 + 2 * top] int32, takes for each draw: its token (negative: the row's state),
            the bits of its log-probability, then ids and bits of log-probabilities of the row's
            most likely tokens.
        token_ids: [rows] int64, takes each row's first draw.
        logits: [rows, vocab].
        packed: the rows; copied to the device of `logits` in one copy.
        chunk_size: token ids a program.

    """
    assert logits.stride(1) == 1
    work = _Work.of(logits, packed, chunk_size)
    yield _score_call(work)
    yield _limit_call(work)
    if bool((packed.rows[:, 0] & IS_GREEDY == 0).any()):
        yield _race_call(work)
    if packed.top:
        yield _best_call(work)
    yield _finish_call(work, out, token_ids)


def _score_call(work: _Work) -> KernelCall:
    return KernelCall(
        score_kernel,
        grid=(len(work.packed.rows), work.num_chunks),
        arguments={
            "scores_ptr": work.scores,
            "stats_ptr": work.stats,
            "ids_ptr": work.best_ids,
            "logits_ptr": work.logits,
            "rows_ptr": work.rows,
            "entries_ptr": work.entries,
            "masks_ptr": work.masks,
            "vocab": work.vocab,
            "words": work.packed.masks.shape[1],
            "stride_logits": work.logits.stride(0),
            "stride_scores": work.vocab,
        },
        constants={"BLOCK": work.chunk_size, "BLOCK_ENTRIES": _ENTRY_BLOCK},
        num_warps=2 * work.num_warps,
        num_stages=1,
    )


def _limit_call(work: _Work) -> KernelCall:
    return KernelCall(
        limit_kernel,
        grid=(len(work.packed.rows),),
        arguments={
            "found_ptr": work.found,
            "states_ptr": work.states,
            "stats_ptr": work.stats,
            "ids_ptr": work.best_ids,
            "rows_ptr": work.rows,
            "scores_ptr": work.scores,
            "vocab": work.vocab,
            "chunks": work.num_chunks,
            "stride_scores": work.vocab,
        },
        constants={"BLOCK": _LIMIT_BLOCK, "BLOCK_CHUNKS": work.block_chunks},
        num_warps=16,
        num_stages=1,
    )


def _race_call(work: _Work) -> KernelCall:
    return KernelCall(
        race_kernel,
        grid=(len(work.packed.draws), work.num_chunks),
        arguments={
            "times_ptr": work.times,
            "ids_ptr": work.drawn_ids,
            "draws_ptr": work.draws,
            "found_ptr": work.found,
            "states_ptr": work.states,
            "rows_ptr": work.rows,
            "logits_ptr": work.logits,
            "scores_ptr": work.scores,
            "vocab": work.vocab,
            "stride_logits": work.logits.stride(0),
            "stride_scores": work.vocab,
        },
        constants={"BLOCK": work.chunk_size},
        num_warps=work.num_warps,
        num_stages=1,
    )


def _best_call(work: _Work) -> KernelCall:
    return KernelCall(
        best_kernel,
        grid=(len(work.packed.listed), work.num_chunks),
        arguments={
            "values_ptr": work.values,
            "ids_ptr": work.value_ids,
            "listed_ptr": work.listed,
            "logits_ptr": work.logits,
            "vocab": work.vocab,
            "stride_logits": work.logits.stride(0),
        },
        constants={"TOP": work.packed.top, "BLOCK": work.chunk_size},
        num_warps=work.num_warps,
        num_stages=1,
    )


def _finish_call(work: _Work, out: Tensor, token_ids: Tensor) -> KernelCall:
    return KernelCall(
        finish_kernel,
        grid=(len(work.packed.draws),),
        arguments={
            "out_ptr": out,
            "token_ids_ptr": token_ids,
            "draws_ptr": work.draws,
            "times_ptr": work.times,
            "ids_ptr": work.drawn_ids,
            "found_ptr": work.found,
            "states_ptr": work.states,
            "rows_ptr": work.rows,
            "logits_ptr": work.logits,
            "values_ptr": work.values,
            "best_ids_ptr": work.value_ids,
            "chunks": work.num_chunks,
            "stride_logits": work.logits.stride(0),
        },
        constants={"TOP": work.packed.top, "BLOCK_CHUNKS": work.block_chunks},
        num_warps=4 if work.packed.top else 1,
        num_stages=1,
    )


def _copied(packed: PackedRows, device: torch.device) -> list[Tensor]:
    parts = (packed.rows, packed.draws, packed.listed, packed.entries, packed.masks)
    # Each starts on 16 bytes: kernels are compiled anew for pointers that do not.
    padded = [np.pad(part.ravel(), (0, -part.size % 4)) for part in parts]
    return list(to_device(np.concatenate(padded), device).split([part.size for part in padded]))
