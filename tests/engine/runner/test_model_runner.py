"""Batches of many adapters: each row is its solo run, whatever shares its step."""

import dataclasses
from itertools import permutations

import pytest
import torch

from engine.models.projections import ProjectionKey
from engine.scheduled_batch import ScheduledBatch
from lora_kernels import LoraSlice
from lora_kernels.cpu_kernels import CpuWeights
from tests.support.model_lab import ModelLab, prompt_of
from tests.support.peft_reference import assert_exact

ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FULL = {"r": 8, "target_modules": ALL_LINEARS, "seed": 1}
PARTIAL = {"r": 3, "target_modules": ["v_proj"], "layers_to_transform": [2], "seed": 2}
STEP = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("runner")


@pytest.fixture(scope="module")
def lab(folder):
    lab = ModelLab(folder, "smollm")
    lab.install(0, lab.adapter("full", **FULL))
    lab.install(2, lab.adapter("partial", **PARTIAL))
    return lab


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def any_lab(request, folder):
    lab = ModelLab(folder, "smollm", dtype=request.param)
    lab.install(0, lab.adapter("full", **FULL))
    lab.install(2, lab.adapter("partial", **PARTIAL))
    return lab


def solo(lab: ModelLab, prompt: list[int], slot: int | None, max_tokens: int = STEP):
    driver = lab.driver()
    sequence = driver.add(prompt, slot)
    driver.generate([sequence], max_tokens)
    return sequence


def assert_bit_equal(sequence, other) -> None:
    assert sequence.output == other.output
    assert torch.equal(torch.stack(sequence.logits), torch.stack(other.logits))


@pytest.mark.parametrize("order", list(permutations([None, 0, 2])), ids=str)
def test_rows_of_all_adapters_in_every_order_equal_their_solo_runs_and_peft(lab, order):
    adapters = {None: None, 0: lab.adapter("full"), 2: lab.adapter("partial")}
    prompts = {None: prompt_of(20, 1), 0: prompt_of(33, 2), 2: prompt_of(5, 4)}
    driver = lab.driver()
    sequences = [driver.add(prompts[slot], slot) for slot in order]
    driver.generate(sequences, STEP)
    for sequence in sequences:
        assert_bit_equal(sequence, solo(lab, sequence.prompt, sequence.slot))
        reference = lab.reference(adapters[sequence.slot])
        assert_exact(sequence.output, reference.greedy(sequence.prompt, STEP))


def test_a_batch_that_changes_from_step_to_step_changes_no_row(any_lab):
    """All three kinds, then base rows only, then one adapter only, rows ending midway."""
    driver = any_lab.driver()
    base, full, partial = (
        driver.add(prompt_of(18, seed), slot) for seed, slot in ((1, None), (2, 0), (3, 2))
    )
    driver.generate([base, full, partial], 4)
    driver.generate([base], 8)
    driver.generate([partial, full], 6)
    driver.generate([full], 9)
    for sequence in (base, full, partial):
        assert_bit_equal(
            sequence, solo(any_lab, sequence.prompt, sequence.slot, len(sequence.output))
        )


def test_base_rows_beside_adapters_equal_an_engine_without_adapters(any_lab):
    driver = any_lab.driver()
    base = driver.add(prompt_of(30), None)
    others = [driver.add(prompt_of(9, seed), slot) for seed, slot in ((1, 0), (2, 2), (3, 0))]
    driver.generate([base, *others], STEP)
    empty = ModelLab(any_lab.model_dir.parent, "smollm", dtype=any_lab.built.dtype)
    assert_bit_equal(base, solo(empty, base.prompt, None))


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
@pytest.mark.parametrize("slot", [None, 0])
def test_chunked_prefill_in_a_crowd_is_bit_equal(any_lab, chunk, slot):
    prompt = prompt_of(75)
    driver = any_lab.driver()
    sequence = driver.add(prompt, slot)
    crowd = [driver.add(prompt_of(n, n), s) for n, s in ((3, 0), (40, None), (17, 2))]
    while sequence.num_left > 1 or not sequence.output:
        parts = [(s, 1 if s.output else s.num_left) for s in crowd]
        driver.step([*parts[:2], (sequence, min(chunk, sequence.num_left)), *parts[2:]])
    driver.generate([*crowd, sequence], max(STEP, *(len(s.output) for s in crowd)))
    assert_bit_equal(sequence, solo(any_lab, prompt, slot, len(sequence.output)))


@pytest.mark.parametrize("slot", [None, 2])
def test_a_preempted_row_is_recomputed_bit_equal(any_lab, slot):
    prompt = prompt_of(60)
    driver = any_lab.driver()
    sequence, other = driver.add(prompt, slot), driver.add(prompt_of(25), 0)
    driver.generate([sequence, other], 7)
    driver.preempt(sequence)
    assert sequence.num_left == 67  # prompt and output run again as one prefill
    driver.generate([sequence], 14, chunk=50)
    assert_bit_equal(sequence, solo(any_lab, prompt, slot, 14))


def test_a_prefix_hit_is_bit_equal(any_lab):
    prompt = prompt_of(70)
    driver = any_lab.driver()
    first = driver.add(prompt, 0)
    driver.generate([first], 3)
    for num_blocks in (1, 3, 4):
        second = driver.add(prompt, 0)
        driver.share_prefix(first, second, num_blocks)
        assert second.num_left == 70 - 16 * num_blocks
        driver.generate([second], 3)
        assert_bit_equal(second, first)


def test_a_copied_block_continues_as_its_source(any_lab):
    driver = any_lab.driver()
    parent = driver.add(prompt_of(21), 0)
    driver.step([(parent, 21)])
    child = driver.add(parent.prompt, 0)
    child.output, child.logits = list(parent.output), list(parent.logits)
    child.blocks, child.num_computed = [parent.blocks[0], 90], parent.num_computed
    driver.step([(parent, 1), (child, 1)], block_copies=[(parent.blocks[1], 90)])
    driver.generate([child, parent], STEP)
    assert_bit_equal(child, parent)
    assert_bit_equal(parent, solo(any_lab, parent.prompt, 0))


def test_a_reused_slot_shows_nothing_of_its_former_adapter(lab):
    prompt = prompt_of(12)
    lab.install(3, lab.adapter("full"))
    assert_bit_equal(solo(lab, prompt, 3), solo(lab, prompt, 0))
    lab.install(3, lab.adapter("partial"))
    assert_bit_equal(solo(lab, prompt, 3), solo(lab, prompt, 2))
    lab.runner.execute(ScheduledBatch(cleared_slots=[3]))
    assert_bit_equal(solo(lab, prompt, 3), solo(lab, prompt, None))


def test_a_step_answers_in_the_order_of_its_rows(lab):
    driver = lab.driver()
    done = driver.add(prompt_of(5), 2)
    chunked = driver.add(prompt_of(30), 0)
    base = driver.add(prompt_of(4), None)
    result = driver.step([(done, 5), (chunked, 10), (base, 4)])
    assert [row is not None for row in result.rows] == [True, False, True]
    assert done.output == solo(lab, done.prompt, 2, 1).output
    assert base.output == solo(lab, base.prompt, None, 1).output


def test_a_step_in_which_no_row_samples_draws_nothing(lab):
    driver = lab.driver()
    sequence = driver.add(prompt_of(30), 0)
    assert driver.step([(sequence, 10)]).rows == [None]


def test_a_step_without_rows_does_only_its_effects(lab):
    assert lab.runner.execute(ScheduledBatch()).rows == []


def test_a_row_that_overflows_harms_nobody_else(any_lab):
    """Its NaN stay in its own rows and blocks, also when the blocks go to another sequence."""
    weights = any_lab.load(any_lab.adapter("full"))
    huge: dict[ProjectionKey, CpuWeights] = {}
    for key, fused in weights.projections.items():
        slices = [fused.slice(index) for index in range(len(fused.slice_sizes))]
        parts = [p and LoraSlice(torch.full_like(p.a, 1e38), p.b, 1e38) for p in slices]
        huge[key] = any_lab.built.kernels.fuse(parts, getattr(torch, any_lab.built.dtype))
    any_lab.runner.install_adapter(3, dataclasses.replace(weights, projections=huge))
    driver = any_lab.driver()
    bad, good = driver.add(prompt_of(40), 3), driver.add(prompt_of(30), None)
    driver.generate([bad, good], 3)
    assert torch.stack(bad.logits).isnan().all()
    freed = set(bad.blocks)
    driver.preempt(bad)
    heir = driver.add(prompt_of(35), 0)
    driver.generate([good, heir], 6)
    assert freed & set(heir.blocks)
    assert_bit_equal(good, solo(any_lab, good.prompt, None, 6))
    assert_bit_equal(heir, solo(any_lab, heir.prompt, 0, 6))
