"""CPU attention: equal to a dense softmax, and bit-equal however a sequence is cut."""

import pytest
import torch

from engine.errors import ConfigError
from engine.ops import DecoderOps, TorchOps
from engine.runner.attention import AttentionShape
from engine.runner.batch_inputs import build_batch_inputs
from engine.runner.kv_cache import KVShape
from engine.scheduled_batch import ScheduledRow
from tests.support.decoder_ops import make_ops, ops_names

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
WINDOWS = [None, 1, 5, 64, 65, 130]
SHAPES = [(6, 2, 16), (4, 4, 8), (3, 1, 64), (20, 1, 32)]
"""(query heads, KV heads, head_dim); the last has more query heads than a row tile."""


@pytest.fixture(params=ops_names())
def ops(request: pytest.FixtureRequest) -> DecoderOps:
    return make_ops(request.param)


class Sequences:
    """Random queries, keys and values of a few sequences, and a cache to run them in."""

    def __init__(
        self, ops, shape, dtype, lengths, *, block_size=16, seed=0, scale=None, softcap=None
    ):
        self.ops = ops
        self.heads, self.kv_heads, self.dim = shape
        self.scale, self.softcap = scale or self.dim**-0.5, softcap
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.query = [random(n, self.heads, self.dim) for n in lengths]
        self.key = [random(n, self.kv_heads, self.dim) for n in lengths]
        self.value = [random(n, self.kv_heads, self.dim) for n in lengths]
        per_sequence = -(-max(lengths) // block_size)
        order = torch.randperm(per_sequence * len(lengths), generator=generator).tolist()
        self.tables = [order[i :: len(lengths)] for i in range(len(lengths))]
        kv_shape = KVShape(
            num_layers=1,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            block_size=block_size,
            dtype=dtype,
        )
        self.cache = ops.make_kv_cache(kv_shape, len(order))

    def run(self, parts, window):
        """Attention of (sequence, start, stop) parts of one step; [tokens, heads * dim] each."""
        attention = self.ops.make_attention(
            AttentionShape(
                num_heads=self.heads,
                num_kv_heads=self.kv_heads,
                head_dim=self.dim,
                block_size=self.cache.block_size,
                windows=(window, None),
                scale=self.scale,
                softcap=self.softcap,
            )
        )
        size = self.cache.block_size
        rows = [
            ScheduledRow(
                sequence_id=s,
                token_ids=[0] * (stop - start),
                start=start,
                block_table=self.tables[s][: -(-stop // size)],
                slot=None,
                sampling=None,
            )
            for s, start, stop in parts
        ]
        inputs = build_batch_inputs(rows, size)
        join = lambda x: torch.cat([x[s][start:stop] for s, start, stop in parts])  # noqa: E731
        self.cache.clear_blocks(inputs.fresh_blocks)
        self.cache.write(0, join(self.key), join(self.value), inputs.slot_mapping)
        padding = len(inputs.token_ids) - inputs.num_tokens
        query = torch.cat(
            (join(self.query), self.query[0].new_zeros(padding, self.heads, self.dim))
        )
        plan = attention.plan(inputs, self.cache)
        out = attention.attend(query, self.cache, 0, window, plan)
        assert not out[inputs.num_tokens :].any()
        return out[: inputs.num_tokens].split([stop - start for _, start, stop in parts])

    def dense(self, s, window):
        """The definition, in float64."""
        group = self.heads // self.kv_heads
        key = self.key[s].double().repeat_interleave(group, dim=1)
        value = self.value[s].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.query[s].double(), key) * self.scale
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        position = torch.arange(len(key))
        hidden = position[None, :] > position[:, None]
        if window is not None:
            hidden |= position[None, :] <= position[:, None] - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def cut(length, chunk):
    return [(start, min(start + chunk, length)) for start in range(0, length, chunk)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_equals_a_dense_softmax(ops, dtype, shape, window):
    sequences = Sequences(ops, shape, dtype, [150, 1, 64, 65])
    whole = sequences.run([(0, 0, 150), (1, 0, 1), (2, 0, 64), (3, 0, 65)], window)
    for s, got in enumerate(whole):
        difference = (got.double() - sequences.dense(s, window)).abs().max()
        assert difference < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize(("scale", "softcap"), [(0.1, None), (None, 1.5), (0.4, 2.0)])
def test_scale_and_soft_cap_follow_their_definitions(ops, dtype, window, scale, softcap):
    options = {"scale": scale, "softcap": softcap}
    sequences = Sequences(ops, (6, 2, 16), dtype, [150, 70], **options)
    whole = sequences.run([(0, 0, 150), (1, 0, 69)], window)
    last = sequences.run([(1, 69, 70)], window)[0]
    for s, got in enumerate([whole[0], torch.cat((whole[1], last))]):
        difference = (got.double() - sequences.dense(s, window)).abs().max()
        assert difference < TOLERANCE[dtype]
    plain = Sequences(ops, (6, 2, 16), dtype, [150, 70])
    assert (plain.dense(0, window) - sequences.dense(0, window)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_soft_capped_scores_are_bit_equal_however_a_sequence_is_cut(ops, dtype, shape):
    options = {"scale": 0.4, "softcap": 3.0}
    (whole,) = Sequences(ops, shape, dtype, [140], **options).run([(0, 0, 140)], 70)
    for chunk in (1, 7, 33, 64):
        sequences = Sequences(ops, shape, dtype, [140], **options)
        pieces = [sequences.run([(0, *part)], 70)[0] for part in cut(140, chunk)]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 5, 65])
def test_chunks_and_decodes_are_bit_equal_to_one_piece(ops, dtype, shape, window):
    length = 140
    (whole,) = Sequences(ops, shape, dtype, [length]).run([(0, 0, length)], window)
    for chunk in (1, 7, 16, 33, 64):
        sequences = Sequences(ops, shape, dtype, [length])
        pieces = [sequences.run([(0, *part)], window)[0] for part in cut(length, chunk)]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("threads", [1, 2])
def test_neighbours_do_not_change_a_bit(ops, dtype, window, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    lengths = [200, 3, 129, 64, 90]
    crowd, alone = (Sequences(ops, (6, 2, 16), dtype, lengths) for _ in range(2))
    try:
        for s, length in enumerate(lengths):
            crowd.run([(s, 0, length - 2)], window)
            alone.run([(s, 0, length - 2)], window)
        for step in (2, 1):
            parts = [(s, n - step, n - step + 1) for s, n in enumerate(lengths)]
            together = crowd.run(parts, window)
            for part, got in zip(parts, together, strict=True):
                assert torch.equal(alone.run([part], window)[0], got)
        mixed = crowd.run([(2, 40, 129), (0, 199, 200), (4, 0, 90), (3, 63, 64)], window)
        assert torch.equal(mixed[0], alone.run([(2, 40, 129)], window)[0])
        assert torch.equal(mixed[3], alone.run([(3, 63, 64)], window)[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_the_block_size_does_not_change_a_bit(block_size):
    ops = TorchOps()  # the compiled kernel has one block size
    whole = Sequences(ops, (6, 2, 16), torch.float32, [100]).run([(0, 0, 100)], None)[0]
    other = Sequences(ops, (6, 2, 16), torch.float32, [100], block_size=block_size)
    assert torch.equal(torch.cat([other.run([(0, *p)], None)[0] for p in cut(100, 9)]), whole)


def test_a_block_size_that_does_not_divide_a_tile_is_refused(ops):
    sequences = Sequences(ops, (2, 1, 8), torch.float32, [5], block_size=24)
    with pytest.raises(ConfigError, match="block_size must divide 64, not 24"):
        sequences.run([(0, 0, 5)], None)


@pytest.mark.parametrize("length", [17, 70])
def test_values_of_a_blocks_former_owner_never_show(ops, length):
    """NaN of a sequence that overflowed must not reach who gets its blocks: 0 * NaN is NaN."""
    clean = Sequences(ops, (6, 2, 16), torch.float32, [length])
    expected = torch.cat([clean.run([(0, *p)], None)[0] for p in cut(length, 16)])
    dirty = Sequences(ops, (6, 2, 16), torch.float32, [length])
    dirty.cache._storage[:, :, :, : dirty.cache.num_blocks] = float("nan")
    got = torch.cat([dirty.run([(0, *p)], None)[0] for p in cut(length, 16)])
    assert torch.equal(got, expected)


def test_unwritten_memory_never_reaches_the_output(ops, monkeypatch):
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: make(*a, **k).fill_(float("nan")))
    sequences = Sequences(ops, (6, 2, 16), torch.float32, [70, 70])
    chunk = sequences.run([(0, 0, 69), (1, 0, 69)], 20)
    decode = sequences.run([(0, 69, 70), (1, 69, 70)], 20)
    assert all(out.isfinite().all() for out in (*chunk, *decode))
