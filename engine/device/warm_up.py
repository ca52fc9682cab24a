"""Makes every kind of launch of an eager step once, at start, so that no step has to compile.

Triton compiles a kernel anew for every set of constants, and again for arguments that are multiples
of 16 or are not. That takes a second each, the first time on a machine, and would hold up all
tenants during a step. Graphs of decode steps are captured at start too, which compiles theirs.
"""

from collections.abc import Iterator, Sequence

import torch

from engine.device.profile import run_step, trial_row
from engine.device.staging import InputStager
from engine.models.decoder import Decoder
from engine.runner.attention import AttentionBackend
from engine.runner.kv_cache import KVCache
from engine.sampling.launched import LaunchingSampler
from lora_kernels import LoraSlice
from lora_kernels.device_kernels import Pin, PinnedWeights
from lora_kernels.tiles import BGMV_MAX_MEAN_ROWS, SGMV_16_MAX_MEAN_ROWS, SMALL_BATCH_ROWS

MOST_LOGPROBS = 20
"""Per token, as in OpenAI's API; the kernels that find them differ for each power of two."""


def warm_up(
    decoder: Decoder,
    kv_cache: KVCache,
    attention: AttentionBackend,
    sampler: LaunchingSampler,
    stager: InputStager,
    *,
    pin: Pin,
    max_loras: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> None:
    """Run trial steps on block 0 of the cache; slots are empty before and after."""
    block_size = kv_cache.block_size

    def run(lengths: Sequence[tuple[int | None, int]]) -> torch.Tensor:
        rows = [
            trial_row(number, length, block_size, slot=slot)
            for number, (slot, length) in enumerate(lengths)
        ]
        return run_step(decoder, kv_cache, attention, sampler, stager, rows)

    for count in decode_counts(max_num_seqs):
        run([(None, 1)] * count)
    if max_loras:
        _fill_first_slot(decoder, pin)
        try:
            for lengths in adapted_steps(
                max_loras, max_num_seqs, max_num_batched_tokens, max_model_len
            ):
                run(lengths)
        finally:
            for projection in decoder.projections.values():
                projection.clear(0)
    logits = run([(None, min(2, max_model_len, max_num_batched_tokens))])
    for logprobs in (1, 2, 4, 8, 16, MOST_LOGPROBS):
        sampling = trial_row(0, 1, block_size, logprobs=logprobs).sampling
        assert sampling is not None
        sampler.launch(logits, [sampling]).result()


def decode_counts(max_num_seqs: int) -> list[int]:
    """Rows of trial steps that together use every number of splits.

    The number of splits is a power of two, which at most halves when the rows double.
    """
    counts = [1 << power for power in range(max_num_seqs.bit_length())]
    return sorted({*counts, max_num_seqs})


def adapted_steps(
    max_loras: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Iterator[list[tuple[int, int]]]:
    """(slot, length) rows of trial steps that together use every variant of the LoRA kernels.

    Rows have one token if that many rows are possible: then the output layer uses the variant too.
    """
    more = SMALL_BATCH_ROWS + 1
    for num_slots, num_tokens in (
        (1, 1),
        (1, BGMV_MAX_MEAN_ROWS + 1),
        (1, SGMV_16_MAX_MEAN_ROWS + 1),
        (1, more),
        (-(-more // SGMV_16_MAX_MEAN_ROWS), more),
    ):
        longest = 1 if num_tokens <= max_num_seqs else max_model_len
        rows = [
            (slot, min(longest, share - begin))
            for slot in range(num_slots)
            for share in [num_tokens * (slot + 1) // num_slots - num_tokens * slot // num_slots]
            for begin in range(0, share, longest)
        ]
        # Steps that the limits forbid here cannot happen later either.
        if (
            num_slots <= max_loras
            and num_tokens <= max_num_batched_tokens
            and len(rows) <= max_num_seqs
        ):
            yield rows


def _fill_first_slot(decoder: Decoder, pin: Pin) -> None:
    """Install an adapter of rank 1 that adds nothing; with rank 0 nothing would be launched."""
    for projection in decoder.projections.values():
        table = projection.lora
        slices = [
            LoraSlice(torch.zeros(1, table.in_features), torch.zeros(size, 1), 1.0)
            for size in table.slice_sizes
        ]
        projection.install(0, PinnedWeights.pack(slices, decoder.dtype, pin))
