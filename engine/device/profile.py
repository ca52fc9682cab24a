"""Runs trial steps, to measure the memory that a step at the token budget takes."""

from functools import partial

import torch
from torch import Tensor

from engine.device.device import Device
from engine.device.staging import InputStager
from engine.models.decoder import Decoder
from engine.runner.attention import AttentionBackend
from engine.runner.batch_inputs import build_batch_inputs
from engine.runner.kv_cache import KVCache
from engine.sampling.launched import LaunchingSampler
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow, ScheduledRow


def profile_rows(
    num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> list[ScheduledRow]:
    """Prefills of equal length that fill a budget, all of which sample; all on block 0."""
    num_rows = max(1, min(max_num_seqs, num_tokens))
    shares = [
        num_tokens * (i + 1) // num_rows - num_tokens * i // num_rows for i in range(num_rows)
    ]
    return [
        trial_row(number, min(share, max_model_len), block_size)
        for number, share in enumerate(shares)
    ]


def trial_row(
    number: int, length: int, block_size: int, *, slot: int | None = None, logprobs: int = 0
) -> ScheduledRow:
    """A prefill of `length` tokens that samples as most requests do; on block 0."""
    params = SamplingParams(max_tokens=1, seed=0, top_p=0.9, logprobs=logprobs)
    return ScheduledRow(
        sequence_id=number,
        token_ids=[0] * length,
        start=0,
        block_table=[0] * -(-length // block_size),
        slot=slot,
        sampling=SamplingRow(params, (0,), [0] * length, length),
    )


def measure_step(
    device: Device,
    decoder: Decoder,
    kv_cache: KVCache,
    attention: AttentionBackend,
    sampler: LaunchingSampler,
    stager: InputStager,
    rows: list[ScheduledRow],
) -> int:
    """Peak bytes that a step takes, beyond what was held before it."""
    return device.peak_of(partial(run_step, decoder, kv_cache, attention, sampler, stager, rows))


@torch.inference_mode()
def run_step(
    decoder: Decoder,
    kv_cache: KVCache,
    attention: AttentionBackend,
    sampler: LaunchingSampler,
    stager: InputStager,
    rows: list[ScheduledRow],
) -> Tensor:
    """Run rows that all sample as an eager step, and wait; returns their logits, [rows, vocab]."""
    inputs = stager.place(build_batch_inputs(rows, kv_cache.block_size, decoder.row_tile))
    logits = decoder.forward(inputs, kv_cache, attention)
    sampling = [row.sampling for row in rows if row.sampling is not None]
    sampler.launch(logits, sampling).result()
    return logits
