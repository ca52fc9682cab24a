"""Decode steps on static, padded buffers: the tokens and the memory of the steps without them."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from engine.device.device import HostDevice
from engine.runner.batch_inputs import NO_BLOCK
from engine.runner.decode_buffers import DecodeBuffers
from engine.runner.decode_ladder import DecodeLadder, ladder_sizes
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow, ScheduledRow
from tests.support.hand_driver import HandSequence
from tests.support.model_lab import NUM_BLOCKS, ModelLab, prompt_of

FULL = {
    "r": 8,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "seed": 1,
}
PARTIAL = {"r": 3, "target_modules": ["v_proj"], "layers_to_transform": [2], "seed": 2}
DORA = {"r": 4, "use_dora": True, "modules_to_save": ["norm"], "seed": 3}
SIZES = (1, 2, 3, 6, 9)
PADDING = NUM_BLOCKS - 1


def with_ladder(lab: ModelLab, sizes: tuple[int, ...] = SIZES) -> DecodeLadder:
    """Give the lab's runner a ladder; the last block of its cache is padding's."""
    built = lab.built
    runner: Any = built.runner
    ladder = DecodeLadder(
        runner._decoder,
        runner._kv_cache,
        runner._attention,
        HostDevice(),
        sizes=sizes,
        max_blocks=12,
        padding_block=PADDING,
    )
    runner._ladder = ladder
    return ladder


def install(lab: ModelLab) -> None:
    lab.install(0, lab.adapter("full", **FULL))
    lab.install(2, lab.adapter("partial", **PARTIAL))
    lab.install(3, lab.adapter("dora", **DORA))


@pytest.fixture(scope="module", params=[("smollm", "float32"), ("smollm", "bfloat16"),
                                        ("mistral", "float32"), ("gemma2", "float32")],
                ids="-".join)  # fmt: skip
def labs(request, tmp_path_factory):
    """The same model twice: eager, and with a ladder."""
    family, dtype = request.param
    folder = tmp_path_factory.mktemp("ladder")
    eager, static = (ModelLab(folder, family, dtype=dtype) for _ in range(2))
    install(eager)
    ladder = with_ladder(static)
    install(static)
    return eager, static, ladder


class Pair:
    """Two drivers that are told the same."""

    def __init__(self, eager: ModelLab, static: ModelLab) -> None:
        self.labs = eager, static
        self.drivers = eager.driver(), static.driver()
        for driver in self.drivers:
            driver._free.remove(PADDING)
        self.sequences: list[tuple[HandSequence, HandSequence]] = []

    def add(self, prompt: list[int], slot: int | None) -> tuple[HandSequence, HandSequence]:
        pair = tuple(driver.add(prompt, slot) for driver in self.drivers)
        self.sequences.append(pair)  # type: ignore[arg-type]
        return pair  # type: ignore[return-value]

    def step(self, parts: list[tuple[tuple[HandSequence, HandSequence], int]]) -> None:
        for index, driver in enumerate(self.drivers):
            driver.step([(pair[index], count) for pair, count in parts])

    def decode(self, pairs: list[tuple[HandSequence, HandSequence]]) -> None:
        self.step([(pair, pair[0].num_left) for pair in pairs])

    def preempt(self, pair: tuple[HandSequence, HandSequence]) -> None:
        for index, driver in enumerate(self.drivers):
            driver.preempt(pair[index])

    def assert_equal(self) -> None:
        for left, right in self.sequences:
            assert left.output == right.output and left.blocks == right.blocks
            if left.logits:
                assert torch.equal(torch.stack(left.logits), torch.stack(right.logits))

    def caches(self) -> list[torch.Tensor]:
        return [lab.runner._kv_cache._storage for lab in self.labs]


def test_every_size_with_rows_of_all_kinds_decodes_as_the_eager_path_does(labs):
    eager, static, ladder = labs
    for count in range(1, SIZES[-1] + 1):
        pair = Pair(eager, static)
        slots = [[None, 0, 2][i % 3] for i in range(count)]
        rows = [pair.add(prompt_of(3 + 5 * i, i), slot) for i, slot in enumerate(slots)]
        for row in rows:
            pair.decode([row])
        for _ in range(4):
            pair.decode(rows)
        pair.assert_equal()
    assert all(rung.graphs for rung in ladder._rungs), "every size ran"
    assert {True, False} == {kind for rung in ladder._rungs for kind in rung.graphs}


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_join_leave_are_preempted_and_swapped_change_no_token(labs, seed):
    eager, static, _ = labs
    random = Random(seed)
    pair = Pair(eager, static)
    live: list[tuple[HandSequence, HandSequence]] = []
    for _ in range(30):
        if len(live) < SIZES[-1] + 1 and random.random() < 0.5:
            slot = random.choice([None, 0, 2, 3])
            live.append(pair.add(prompt_of(random.randrange(1, 30), random.randrange(99)), slot))
        if len(live) > 1 and random.random() < 0.25:
            gone = live.pop(random.randrange(len(live)))
            pair.preempt(gone)  # its blocks go to others
        if live and random.random() < 0.2:
            pair.preempt(random.choice(live))
        if random.random() < 0.2:  # what a slot held is another's now
            name, config = random.choice([("full", FULL), ("partial", PARTIAL)])
            users = [row for row in live if row[0].slot == 2]
            for row in users:
                pair.preempt(row)
                live.remove(row)
            for lab in pair.labs:
                lab.runner.clear_slot(2)
                lab.install(2, lab.adapter(name, **config))
        if live:
            random.shuffle(live)
            pair.decode(live)
    pair.assert_equal()
    assert sum(len(left.output) for left, _ in pair.sequences) > 40
    for lab in pair.labs:
        lab.install(2, lab.adapter("partial", **PARTIAL))


def test_padding_writes_nowhere_and_is_read_by_nobody(labs):
    """All that no sequence owns is NaN, before each step; a block that is written is not."""
    eager, static, _ = labs
    pair = Pair(eager, static)
    rows = [pair.add(prompt_of(14 + i, i), slot) for i, slot in enumerate([None, 0, 2, 0])]
    for row in rows:
        pair.decode([row])
    storage = pair.caches()[1]
    counts = [4, 4, 1, 3, 2, 4, 4]
    for count in counts:
        free = sorted(set(range(NUM_BLOCKS)) - {b for row in rows for b in row[1].blocks})
        storage[:, :, :, free] = float("nan")
        before = storage.clone()
        pair.decode(rows[:count])
        written = {row[1].blocks[(len(row[1].token_ids) - 2) // 16] for row in rows[:count]}
        same = [block for block in range(NUM_BLOCKS) if block not in written | {PADDING}]
        assert torch.equal(
            storage[:, :, :, same].view(torch.uint8), before[:, :, :, same].view(torch.uint8)
        ), "a block was written that belongs to no row of the step"
    pair.assert_equal()
    assert all(logits.isfinite().all() for _, row in rows for logits in row.logits)


def test_rows_that_graphs_do_not_cover_run_eagerly_beside_none_that_they_do(labs):
    eager, static, ladder = labs
    runs: list[int] = []
    prepare = ladder.prepare
    ladder.prepare = lambda rows, drawn=None: runs.append(len(rows)) or prepare(rows, drawn)
    try:
        pair = Pair(eager, static)
        rows = [pair.add(prompt_of(9, i), slot) for i, slot in enumerate([None, 3, 0])]
        for row in rows:
            pair.decode([row])
        pair.decode(rows)  # with DoRA
        pair.step([(pair.add(prompt_of(40), 0), 30), (rows[0], 1)])  # with a prefill
        assert runs == []
        pair.decode([rows[0], rows[2]])
        many = [pair.add([i], None) for i in range(SIZES[-1] + 1)]
        for row in many:
            pair.step([(row, 1)])
        runs.clear()
        pair.decode(many)
        assert runs == [], "more rows than the largest size"
        pair.assert_equal()
    finally:
        ladder.prepare = prepare


def test_a_row_longer_than_the_buffers_runs_eagerly(labs):
    eager, static, _ = labs
    pair = Pair(eager, static)
    row = pair.add(prompt_of(12 * 16 - 1), None)
    pair.decode([row])
    for _ in range(3):  # across the last block of the buffers
        pair.decode([row])
    pair.assert_equal()
    assert len(row[1].blocks) == 13


def test_all_graphs_are_captured_on_padding_alone_and_touch_no_block(tmp_path):
    lab = ModelLab(tmp_path, "llama")
    storage = lab.runner._kv_cache._storage
    ladder = with_ladder(lab)
    storage[:, :, :, :PADDING] = float("nan")
    assert ladder.capture() == len(SIZES)
    assert storage[:, :, :, :PADDING].isnan().all()
    assert storage[:, :, :, PADDING].isfinite().all()


def test_sizes_pad_little_and_end_with_what_there_can_be():
    for most in (1, 2, 3, 5, 8, 32, 57, 64, 200, 256, 300, 1024):
        sizes = ladder_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
        for count in range(1, most + 1):
            size = min(size for size in sizes if size >= count)
            assert size - count < max(8, count / 4)
    assert len(ladder_sizes(256)) == 23


def row(start: int, table: list[int], slot: int | None = None) -> ScheduledRow:
    sampling = SamplingRow(SamplingParams(max_tokens=1, seed=0), (0,), [], 0)
    return ScheduledRow(1, [start + 100], start, table, slot, sampling)


def test_buffers_show_only_the_rows_at_hand_and_padding():
    buffers = DecodeBuffers(
        4, max_blocks=5, padding_block=9, block_size=16, row_tile=4, device=HostDevice()
    )
    places = [buffers.inputs.token_ids.data_ptr(), buffers.inputs.slot_mapping.data_ptr()]
    buffers.fill([row(70, [3, 4, 5, 6, 7], 1), row(20, [1, 2]), row(16, [8, 0], 0)])
    assert buffers.fill([row(0, [6], 2), row(33, [1, 2, 4])]) == (1, 0)
    inputs = buffers.inputs
    assert inputs.token_ids.tolist() == [133, 100, 0, 0]
    assert inputs.positions.tolist() == [33, 0, 0, 0]
    assert inputs.slot_mapping.tolist() == [4 * 16 + 1, 6 * 16, 9 * 16, 9 * 16]
    assert inputs.fresh_blocks.tolist() == [6]
    expected = np.full((4, 5), NO_BLOCK)
    expected[0, :3], expected[1, 0], expected[2:, 0] = [1, 2, 4], 6, 9
    assert np.array_equal(inputs.block_tables, expected)
    assert inputs.lora.segment_slot == (2,) and inputs.lora.permutation.tolist() == [1]
    assert places == [inputs.token_ids.data_ptr(), inputs.slot_mapping.data_ptr()]
    buffers.fill([row(1, [5])])
    assert buffers.inputs.lora.is_empty and buffers.num_rows == 1
