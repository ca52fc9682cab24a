"""Paged attention in Triton's interpreter: its definition, whatever the batch and its features."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.triton.kv_cache import TritonKVCache
from engine.triton.query_tiles import chunk_tiles, decode_tiles
from engine.triton.tiles import attention_tile, choose_num_splits, table_of
from tests.support.paged_attention import PagedSequences

LENGTHS = [37, 18, 70, 1, 33]
MIXED = [(0, 0, 37), (1, 17, 18), (2, 20, 70), (3, 0, 1), (4, 31, 33)]
"""A whole prefill, a decode, a chunk behind cached positions, a first token, two tokens."""


@pytest.mark.parametrize(
    ("shape", "dtype", "window", "options"),
    [
        ((4, 2, 64), torch.float32, None, {}),
        ((7, 1, 64), torch.float16, None, {}),
        ((2, 2, 80), torch.float16, 19, {}),
        ((3, 1, 96), torch.float32, 1, {"scale": 0.2}),
        ((2, 1, 128), torch.float16, None, {"softcap": 2.0}),
        ((2, 1, 256), torch.float16, 33, {"softcap": 1.5, "scale": 0.1}),
        ((20, 1, 16), torch.float32, 64, {}),
        ((6, 2, 32), torch.float16, None, {"is_fp8": True}),
        ((2, 1, 64), torch.float16, 21, {"is_fp8": True, "softcap": 1.0, "architecture": 80}),
        ((4, 2, 40), torch.float32, 16, {"batch_invariant": True}),
    ],
    ids=str,
)
def test_a_mixed_step_equals_the_definition(shape, dtype, window, options: dict[str, Any]):
    PagedSequences(shape, dtype, LENGTHS, **options).assert_right(MIXED, window)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float16, 40)], ids=str)
def test_shares_of_a_rows_positions_are_put_together(dtype, window):
    lengths = [300, 1, 16, 65, 129]
    sequences = PagedSequences((4, 2, 32), dtype, lengths, max_positions=4096)
    parts = [(s, n - 1, n) for s, n in enumerate(lengths)]
    plan = sequences.attention.plan(sequences.inputs(parts), sequences.cache)
    assert [group.num_splits for group in plan.groups] == [16]  # most of them have nothing
    sequences.assert_right(parts, window)


def test_shares_take_room_by_their_rows_whatever_runs_beside_them():
    sequences = PagedSequences((4, 2, 32), torch.float32, LENGTHS, max_positions=4096)
    plan = sequences.attention.plan(sequences.inputs(MIXED), sequences.cache)
    single, several = plan.groups
    assert single.num_splits > 1 and several.num_splits == 1
    assert single.partial is not None and single.lse is not None
    assert single.partial.shape == (2, 4, single.num_splits, 32), "of 91 tokens, 2 are shared out"
    assert single.lse.shape == (2, 4, single.num_splits)
    sequences.assert_right(MIXED)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([None, 1, 7, 32]),
)
def test_any_rows_of_any_lengths(spans, window):
    lengths = [stop for _, stop in spans]
    sequences = PagedSequences((3, 1, 16), torch.float32, lengths, seed=len(spans))
    parts = [(s, start, stop) for s, (start, stop) in enumerate(spans)]
    sequences.assert_right(parts, window)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_static_plan_serves_later_steps_and_padding_touches_nothing(is_split):
    lengths = [50, 20, 33]
    limit = 4096 if is_split else 1
    sequences = PagedSequences((4, 2, 16), torch.float32, lengths, max_positions=limit)
    plan = sequences.attention.make_static_plan(3, 6, sequences.cache)
    (group,) = plan.plan.groups
    held = [plan.plan.block_tables, group.tiles, group.partial, group.lse]
    bytes_held = sum(tensor.nbytes for tensor in held if tensor is not None)
    assert bytes_held == sequences.attention.static_plan_bytes(3, 6)
    addresses = [t.data_ptr() for t in (plan.plan.block_tables, plan.plan.groups[0].tiles)]
    for parts in ([(0, 40, 41), (1, 19, 20), (2, 0, 1)], [(2, 32, 33), (0, 49, 50), (1, 4, 5)]):
        got = sequences.run(parts, None, plan)
        for (s, start, stop), rows in zip(parts, got, strict=True):
            expected = sequences.dense(s, None)[start:stop]
            assert (rows.double() - expected).abs().max() < 1e-5
    inputs = sequences.inputs([(0, 30, 31), (1, 7, 8), (2, 3, 4)])
    inputs.starts[1] = -1
    inputs.block_tables[1] = 10**6  # where there is no block
    plan.plan.block_tables[:, 2:] = -7
    plan.update(inputs)
    assert (plan.plan.block_tables[:, 2:] == -7).all(), "position 30 is in the second block"
    query = torch.cat([sequences.query[s][p][None] for s, p in ((0, 30), (1, 7), (2, 3))])
    query[1] = float("nan")
    out = sequences.attention.attend(query, sequences.cache, 1, None, plan)
    assert not out[1].any()
    for row, (s, position) in {0: (0, 30), 2: (2, 3)}.items():
        expected = sequences.dense(s, None)[position]
        assert (out[row].double() - expected).abs().max() < 1e-5
    assert [t.data_ptr() for t in (plan.plan.block_tables, plan.plan.groups[0].tiles)] == addresses
    with pytest.raises(ValueError, match="the plan is for 3 rows of up to 6"):
        plan.update(sequences.inputs([(0, 30, 31)]))


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"), [(torch.float32, None, None), (torch.float16, 20, 2.0)]
)
def test_invariant_rows_have_their_bits_however_they_are_cut_and_whoever_is_beside(
    dtype, window, softcap
):
    options: dict[str, Any] = {"batch_invariant": True, "softcap": softcap}
    sequences = PagedSequences((3, 1, 16), dtype, [70, 40], **options)
    (whole,) = sequences.run([(0, 0, 70)], window)
    cuts = [(0, 1), (1, 18), (18, 19), (19, 64), (64, 70)]
    pieces = [sequences.run([(0, *cut), (1, 3, 30)], window)[0] for cut in cuts]
    assert torch.equal(torch.cat(pieces), whole)


def test_addresses_past_2_to_the_31_elements():
    """Heads so far apart that 32 bits do not count to them."""
    sequences = PagedSequences((2, 2, 16), torch.float16, [20])

    def far_apart(values: torch.Tensor) -> torch.Tensor:
        stride = 2**31 + 64
        storage = torch.empty(stride + values[0].numel(), dtype=values.dtype)
        spread = storage.as_strided(values.shape, (stride, *values.stride()[1:]))
        return spread.copy_(values)

    keys, values = sequences.cache.layer(1)
    sequences.cache._layers[1] = (far_apart(keys), far_apart(values))
    sequences.assert_right([(0, 0, 20)])  # stores there, too


def test_nothing_before_a_launch_reads_the_device(monkeypatch: pytest.MonkeyPatch):
    """A capture would end at the first read."""
    sequences = PagedSequences((2, 1, 16), torch.float32, LENGTHS, max_positions=4096)
    inputs = sequences.inputs(MIXED)
    query = torch.zeros(len(inputs.token_ids), 2, 16)
    out = torch.zeros(len(query), 32)

    def refuse(name: str) -> Callable[..., None]:
        def read(*_: object, **__: object) -> None:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return read

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse(name))
    plan = sequences.attention.plan(inputs, sequences.cache)
    calls = list(sequences.attention.calls(out, query, sequences.cache, 1, None, plan))
    # Decodes in shares, what puts them together, and all other rows.
    assert len(calls) == 3


def test_tiles_hold_each_query_once_and_the_longest_come_first():
    rows, lengths, starts = np.array([0, 2]), np.array([10, 3]), np.array([5, 100])
    tiles = chunk_tiles(rows, np.array([0, 11]), lengths, starts, 4)
    assert tiles.tolist() == [[2, 11, 3, 100], [0, 8, 2, 13], [0, 4, 4, 9], [0, 0, 4, 5]]
    single = decode_tiles(np.array([1]), np.array([10]), np.array([77]))
    assert single.tolist() == [[1, 10, 1, 77]]


def test_splits_follow_from_what_is_known_before_a_step():
    assert choose_num_splits(256, 8, 8192, 90) == 1  # rows enough for every processor
    assert choose_num_splits(1, 8, 256, 90) == 1  # nothing to share
    assert choose_num_splits(1, 8, 8192, 90) == 32
    for rows, heads, positions, architecture in product(
        (1, 7, 64), (1, 8), (1000, 130_000), (80, 90, 100)
    ):
        splits = choose_num_splits(rows, heads, positions, architecture)
        assert splits & (splits - 1) == 0
        assert splits >= choose_num_splits(rows + 1, heads, positions, architecture)


def test_newer_gpus_use_the_tiles_of_their_kin():
    assert [table_of(a) for a in (80, 86, 89, 90, 100, 103, 120)] == [80, 80, 80, 90, 100, 100, 80]
    with pytest.raises(ValueError, match=r"7\.5 is before 8\.0"):
        table_of(75)
    assert attention_tile("decode", 20, 64, torch.float16, 90).rows == 32


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((65, 1, 64), "65 query heads share a KV head"),
        ((2, 1, 320), "320 channels"),
        ((3, 2, 64), "3 query heads are no multiple of 2"),
    ],
)
def test_heads_that_the_kernel_does_not_take_are_refused(shape, message):
    with pytest.raises(ConfigError, match=message):
        PagedSequences(shape, torch.float16, [1])


def test_blocks_are_copied_in_order_in_every_layer():
    sequences = PagedSequences((1, 1, 16), torch.float32, [60])
    cache: TritonKVCache = sequences.cache
    cache._storage.copy_(torch.randn(cache._storage.shape))
    before = cache._storage.clone()
    cache.copy_blocks([(0, 2), (1, 3)])
    assert torch.equal(cache._storage[:, :, :, 2:4], before[:, :, :, :2])
    cache.copy_blocks([(3, 0), (0, 1)])  # the second reads what the first wrote
    for block in (0, 1):
        assert torch.equal(cache._storage[:, :, :, block], before[:, :, :, 1])


@pytest.mark.parametrize("scales", [torch.ones(1, 2, 1), torch.zeros(2, 2, 1)], ids=["shape", "0"])
def test_scales_that_cannot_be_are_refused(scales):
    sequences = PagedSequences((1, 1, 16), torch.float16, [4], is_fp8=True)
    with pytest.raises(ValueError, match="KV scales"):
        sequences.cache.set_scales(scales)


def test_a_float32_model_is_refused_an_8_bit_cache():
    sequences = PagedSequences((1, 1, 16), torch.float32, [4], is_fp8=True)
    with pytest.raises(ConfigError, match="dtype: a float32 model cannot keep its KV cache in 8"):
        sequences.run([(0, 0, 4)])
