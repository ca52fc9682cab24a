import numpy as np
import pytest
import torch

from engine.runner.batch_inputs import NO_BLOCK, build_batch_inputs
from engine.runner.kv_cache import KVCache, KVShape
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow, ScheduledRow

SAMPLING = SamplingRow(SamplingParams(max_tokens=1, seed=0), (0,), [], 0)


def row(token_ids, start, blocks, slot=None, sampling=SAMPLING) -> ScheduledRow:
    return ScheduledRow(0, token_ids, start, blocks, slot, sampling)


def test_rows_are_laid_out_by_slot_and_padded_to_a_row_tile():
    inputs = build_batch_inputs(
        [
            row([50], 5, [7, 2], slot=1),
            row([10, 11, 12], 2, [3, 9], sampling=None),
            row([60, 61], 0, [4], slot=0),
        ],
        block_size=4,
    )
    assert inputs.num_tokens == 6
    assert inputs.token_ids.tolist() == [10, 11, 12, 60, 61, 50] + [0] * 10
    assert inputs.positions.tolist() == [2, 3, 4, 0, 1, 5] + [0] * 10
    assert inputs.slot_mapping.tolist() == [14, 15, 36, 16, 17, 9]
    assert inputs.fresh_blocks.tolist() == [9, 4]
    assert inputs.query_start_loc.tolist() == [0, 3, 5, 6]
    assert inputs.starts.tolist() == [2, 0, 5]
    assert inputs.block_tables.tolist() == [[3, 9], [4, NO_BLOCK], [7, 2]]
    assert inputs.logit_tokens.tolist() == [4, 5]
    assert inputs.logit_rows == (2, 0)
    assert inputs.lora.segment_slot == (0, 1)
    assert inputs.lora.segment_start == (3, 5)


def test_a_batch_that_samples_nothing_has_no_logits():
    inputs = build_batch_inputs([row([1] * 40, 0, [0, 1, 2], sampling=None)], block_size=16)
    assert inputs.logit_tokens.numel() == 0
    assert len(inputs.token_ids) == 48
    assert inputs.fresh_blocks.tolist() == [0, 1, 2]


def test_a_block_table_too_short_for_its_tokens_is_an_error():
    with pytest.raises(IndexError):
        build_batch_inputs([row([1] * 17, 0, [0])], block_size=16)


SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, block_size=2, dtype=torch.float32)


def cache() -> KVCache:
    return KVCache(SHAPE, 5)


def test_keys_and_values_land_where_the_slot_mapping_says():
    kv = cache()
    kv.clear_blocks(torch.arange(kv.num_blocks))
    key, value = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    kv.write(1, key, value, torch.tensor([9, 0, 3]))
    for stored, new in zip(kv.layer(1), (key, value), strict=True):
        for token, (block, offset) in enumerate([(4, 1), (0, 0), (1, 1)]):
            assert torch.equal(stored[:, block, offset], new[token])
        assert stored.count_nonzero() == new.count_nonzero()
    assert not kv.layer(0)[0].any()


def test_blocks_are_cleared_and_copied_in_all_layers_and_the_zero_block_stays_zero():
    kv = cache()
    for layer in range(2):
        kv.write(layer, torch.randn(10, 3, 4), torch.randn(10, 3, 4), torch.arange(10))
    before = kv._storage.clone()
    kv.copy_blocks([(0, 1), (1, 2)])
    kv.clear_blocks(torch.tensor([4]))
    kv.clear_blocks(torch.tensor([], dtype=torch.int64))
    expected = before.clone()
    expected[:, :, :, 1] = expected[:, :, :, 2] = before[:, :, :, 0]
    expected[:, :, :, 4] = 0
    assert torch.equal(kv._storage, expected)
    assert kv.zero_block == 5 and not before[:, :, :, 5].any()


def test_a_blocks_size_in_bytes_is_what_the_cache_takes():
    kv = cache()
    assert kv._storage.nbytes == SHAPE.bytes_per_block * (kv.num_blocks + 1)


def test_live_sequences_of_any_kind_are_read_not_kept():
    tokens, table = np.array([1, 2, 3]), (0,)
    inputs = build_batch_inputs([row(tokens, 0, table)], block_size=16)
    tokens[:] = 9
    assert inputs.token_ids[:3].tolist() == [1, 2, 3]
