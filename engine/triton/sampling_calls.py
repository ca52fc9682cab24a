"""Launches that draw a step's tokens; see `sampling_kernels`."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.triton.sampling_batch import PackedRows
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
    (num_rows, vocab), device = logits.shape, logits.device
    num_draws, num_listed, top = len(packed.draws), len(packed.listed), packed.top
    chunks = -(-vocab // chunk_size)
    rows, draws, listed, entries, masks = _copied(packed, device)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    has_scores = bool((packed.rows[:, 0] & 2).any())
    scores = scratch(num_rows if has_scores else 1, vocab)
    stats, best_ids = scratch(num_rows, chunks, 3), scratch(num_rows, chunks, dtype=torch.int32)
    found, states = scratch(num_rows, 3), scratch(num_rows, 2, dtype=torch.int32)
    times, ids = scratch(num_draws, chunks), scratch(num_draws, chunks, dtype=torch.int32)
    values = scratch(max(num_listed, 1), chunks, max(top, 1))
    value_ids = scratch(max(num_listed, 1), chunks, max(top, 1), dtype=torch.int32)
    block_chunks = max(2, 1 << (chunks - 1).bit_length())
    shared = {
        "rows_ptr": rows,
        "logits_ptr": logits,
        "stride_logits": logits.stride(0),
    }
    ranges = {"found_ptr": found, "states_ptr": states}
    # 16 elements a thread.
    num_warps = max(1, min(8, chunk_size // 512))

    yield KernelCall(
        score_kernel,
        (num_rows, chunks),
        {
            **shared,
            "scores_ptr": scores,
            "stats_ptr": stats,
            "ids_ptr": best_ids,
            "entries_ptr": entries,
            "masks_ptr": masks,
            "vocab": vocab,
            "words": packed.masks.shape[1],
            "stride_scores": vocab,
        },
        {"BLOCK": chunk_size, "BLOCK_ENTRIES": _ENTRY_BLOCK},
        2 * num_warps,
        1,
    )
    yield KernelCall(
        limit_kernel,
        (num_rows,),
        {
            **ranges,
            "stats_ptr": stats,
            "ids_ptr": best_ids,
            "rows_ptr": rows,
            "scores_ptr": scores,
            "vocab": vocab,
            "chunks": chunks,
            "stride_scores": vocab,
        },
        {"BLOCK": _LIMIT_BLOCK, "BLOCK_CHUNKS": block_chunks},
        16,
        1,
    )
    if bool((packed.rows[:, 0] & 1 == 0).any()):
        yield KernelCall(
            race_kernel,
            (num_draws, chunks),
            {
                **shared,
                **ranges,
                "times_ptr": times,
                "ids_ptr": ids,
                "draws_ptr": draws,
                "scores_ptr": scores,
                "vocab": vocab,
                "stride_scores": vocab,
            },
            {"BLOCK": chunk_size},
            num_warps,
            1,
        )
    if top:
        yield KernelCall(
            best_kernel,
            (num_listed, chunks),
            {
                "values_ptr": values,
                "ids_ptr": value_ids,
                "listed_ptr": listed,
                "logits_ptr": logits,
                "vocab": vocab,
                "stride_logits": logits.stride(0),
            },
            {"TOP": top, "BLOCK": chunk_size},
            num_warps,
            1,
        )
    yield KernelCall(
        finish_kernel,
        (num_draws,),
        {
            **shared,
            **ranges,
            "out_ptr": out,
            "token_ids_ptr": token_ids,
            "draws_ptr": draws,
            "times_ptr": times,
            "ids_ptr": ids,
            "values_ptr": values,
            "best_ids_ptr": value_ids,
            "chunks": chunks,
        },
        {"TOP": top, "BLOCK_CHUNKS": block_chunks},
        4 if top else 1,
        1,
    )


def _copied(packed: PackedRows, device: torch.device) -> list[Tensor]:
    parts = (packed.rows, packed.draws, packed.listed, packed.entries, packed.masks)
    # Each starts on 16 bytes: kernels are compiled anew for pointers that do not.
    padded = [np.pad(part.ravel(), (0, -part.size % 4)) for part in parts]
    return list(to_device(np.concatenate(padded), device).split([part.size for part in padded]))
