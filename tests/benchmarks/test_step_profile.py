"""Where a step's time goes: own times that add up, and floors that are arithmetic."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import chunked_prefill, policies, step_profile
from benchmarks.engine_lab import EngineLab, num_new_tokens, random_prompt, read_adapters
from benchmarks.floor import (
    HEAD,
    FloorMeter,
    Load,
    ModelShapes,
    attention_flops,
    gemm_name,
    kv_bytes,
    lora_bytes,
    lora_flops,
    lora_weights,
    tokens_per_second,
)
from benchmarks.part_clock import PartClock, Target
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from engine.models.decoder_config import read_decoder_config
from engine.runner.build_runner import BuiltRunner, build_runner
from tests.support.tiny_models import make_tiny_model

SMOLLM2_135M = ModelShapes(
    hidden=576, inner=1536, query=576, kv=192, num_layers=30, vocab_size=49152
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(folder, "llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def built(model_dir) -> BuiltRunner:
    return build_runner(model_dir, num_kv_blocks=200, max_loras=8, self_test=False)


@pytest.fixture(scope="module")
def adapters(model_dir, built, tmp_path_factory):
    folders = write_adapters(model_dir, tmp_path_factory.mktemp("adapters"), adapter_names(8), 4)
    return read_adapters(built, folders)


class Steps:
    """Functions that take one unit of their own each, on a clock that they advance."""

    def __init__(self) -> None:
        self.now = 0

    def outer(self) -> None:
        self.now += 1
        self.inner(3)
        self.now += 1

    def inner(self, units: int) -> None:
        self.now += units
        if units > 2:
            self.inner(2)


def test_each_part_is_charged_with_its_own_time():
    steps = Steps()
    clock = PartClock(lambda: steps.now)
    by_units: Callable[..., str] = lambda units: f"inner {units}"  # noqa: E731
    with clock.watching([Target(steps, "outer", "outer"), Target(steps, "inner", by_units)]):
        steps.outer()
    assert clock.take() == {"outer": 2, "inner 3": 3, "inner 2": 2}
    steps.outer()  # no longer watched
    assert clock.take() == {}


def test_a_target_that_is_gone_is_named():
    with (
        pytest.raises(AttributeError, match="middle"),
        PartClock().watching([Target(Steps, "middle", "middle")]),
    ):
        pass


def test_the_models_bytes_and_flops():
    load = Load(
        rows=32, logit_rows=32, context_tokens=6400, scores=6400, adapters=8, adapter_rows=32
    )
    assert SMOLLM2_135M.body_weights == 106_168_320
    assert lora_weights(SMOLLM2_135M, 16) == 30 * 16 * (
        3 * 576 + 960 + 1152 + 2 * 576 + 3072 + 1536 + 576
    )
    assert kv_bytes(SMOLLM2_135M, load) == 2 * 2 * 192 * 30 * 6400
    assert attention_flops(SMOLLM2_135M, load) == 2 * 2 * 9 * 64 * 30 * 6400
    assert lora_bytes(SMOLLM2_135M, load) == 2 * 8 * lora_weights(SMOLLM2_135M, 16)
    assert lora_flops(SMOLLM2_135M, load) == 2 * 32 * lora_weights(SMOLLM2_135M, 16)


def test_a_step_computes_what_its_kind_says():
    decode, _, prefill = (kind.load() for kind in step_profile.KINDS)
    assert (decode.rows, decode.context_tokens, decode.scores) == (32, 6400, 6400)
    assert (prefill.rows, prefill.context_tokens, prefill.adapters) == (512, 512, 4)
    assert prefill.scores == 4 * sum(range(1, 129))


def test_a_floors_throughput_counts_prompts_and_outputs():
    assert tokens_per_second(200, 100, prefill_ms_per_token=1.0, decode_ms_per_token=3.0) == 200.0


def test_every_part_that_has_a_floor_is_a_part_of_a_step(model_dir, built, adapters):
    profiler = step_profile.StepProfiler(built, adapters, lambda: 0)
    meter = FloorMeter(ModelShapes.of(read_decoder_config(model_dir)))
    kind = step_profile.Kind("few", sequences=3, length=20, adapters=2, decodes=True)
    profile = step_profile.Profile()
    profiler.run(kind, profile)
    floors = meter.milliseconds(kind.load())
    names = set(profile.parts[0])
    assert set(floors) <= names
    assert {HEAD, "LoRA", "attention", gemm_name(64, 128)} <= set(floors)
    assert all(value > 0 for value in floors.values())
    assert len(profile.steps) == step_profile.DECODE_STEPS


def test_parts_add_up_to_the_step(built, adapters):
    ticks = iter(range(10**9))
    profiler = step_profile.StepProfiler(built, adapters, lambda: next(ticks))
    for kind in (
        step_profile.Kind("decode", sequences=3, length=20, adapters=0, decodes=True),
        step_profile.Kind("prefill", sequences=2, length=30, adapters=2, decodes=False),
    ):
        profile = step_profile.Profile()
        profiler.run(kind, profile)
        for step, parts in zip(profile.steps, profile.parts, strict=True):
            # The clock ticks at every reading: two of them lie outside of the outermost part.
            assert sum(parts.values()) == pytest.approx(step - 2e-6)


def test_medians_count_a_missing_part_as_nothing():
    samples = [{"a": 1.0}, {"a": 3.0, "b": 5.0}, {"a": 2.0}]
    assert step_profile.median_of_each(samples) == {"a": 2.0, "b": 0.0}


def test_a_lab_serves_exact_lengths_with_and_without_adapters(built, adapters):
    lab = EngineLab(built, adapters, max_loras=2, max_num_batched_tokens=64)
    digests = list(adapters)
    for number in range(6):
        prompt = random_prompt(built.vocab_size, 10, number)
        lab.add(prompt, 5, digests[number] if number < 4 else None)
    tokens = 0
    while lab.core.has_work or lab.core.stats().waiting:
        tokens += num_new_tokens(lab.step())
    assert tokens == 30
    assert lab.core.stats().running == 0


def test_outputs_follow_the_distribution_and_the_formula_its_maxima():
    lengths = policies.output_lengths(4000)
    assert (min(lengths), max(lengths)) == (8, 1024)
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(policies.expected_longest(1), rel=0.005)
    batches = [lengths[start : start + 16] for start in range(0, 4000, 16)]
    longest = sum(map(max, batches)) / len(batches)
    assert longest == pytest.approx(policies.expected_longest(16), rel=0.06)
    assert policies.slot_efficiency(1) == 1.0
    assert policies.slot_efficiency(32) < policies.slot_efficiency(16) < 0.4


def test_static_batches_compute_their_finished_rows_and_continuous_ones_have_none(built):
    lengths = [8, 2, 3, 1, 3, 4, 2, 5]
    prompts = [random_prompt(built.vocab_size, 6, number) for number in range(8)]
    static = policies.run_policy(built, prompts, lengths, 4, static=True)
    assert (static.tokens, static.rows) == (28, 52)
    continuous = policies.run_policy(built, prompts, lengths, 4, static=False)
    assert continuous.rows == continuous.tokens <= 28


def test_a_long_prompt_arrives_among_sequences_that_decode(built, monkeypatch):
    monkeypatch.setattr(chunked_prefill, "DECODING", 3)
    monkeypatch.setattr(chunked_prefill, "CONTEXT_TOKENS", 5)
    monkeypatch.setattr(chunked_prefill, "PROMPT_TOKENS", 60)
    chunked, whole = chunked_prefill.measure(built, [16], repeats=1)
    # 13 prompt tokens a step beside 3 decodes: 5 steps, and each running sequence has 5 gaps.
    assert len(chunked.gaps) == 15
    assert len(chunked.mixed_steps) == 1
    # The whole prompt in one step without decodes, then one with them.
    assert len(whole.gaps) == 3
