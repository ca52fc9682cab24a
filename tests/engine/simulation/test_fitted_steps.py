"""Step models: costs come back out of steps that were made from them."""

import json
from random import Random

import msgspec
import pytest

from engine.config import SchedulerConfig
from engine.errors import ConfigError
from engine.simulation.driver import Simulation
from engine.simulation.fitted import (
    FittedStepTime,
    StepCosts,
    StepModel,
    fit_steps,
    median_seconds,
    read_step_model,
    read_steps,
    scaled,
    slowness,
)
from engine.simulation.step_load import StepLoad
from engine.telemetry.records import StepRecord, StepSeconds, StepShare
from tests.support.memory_engine import request

COSTS = StepCosts(
    step=0.012, row=2e-4, padded_token=4e-4, token=0.0, context_token=1e-6, adapter=5e-4,
    lora_token=1e-4,
)  # fmt: skip


def make_steps(number, *, seed=0, pause=0.001, noise=0.0, costs=COSTS):
    """Steps of all kinds, each after a pause."""
    random, at, steps = Random(seed), 1e9, []
    for n in range(number):
        decodes, prefill = random.randint(1, 32), random.choice([0, 0, 100, 240])
        adapters = random.randint(0, min(8, decodes))
        blocks = random.randint(decodes, 40 * decodes)
        shares = [StepShare("acme", f"a{k}@1", 0, 0, decodes // 8) for k in range(adapters)]
        rest = decodes - sum(share.decode_rows for share in shares)
        shares.append(StepShare("acme", None, int(prefill > 0), prefill, rest))
        load = StepLoad(
            num_rows=decodes + (prefill > 0), num_tokens=decodes + prefill, context=16 * blocks,
            num_adapters=adapters, lora_tokens=decodes - rest,
        )  # fmt: skip
        took = FittedStepTime(costs).seconds(load) * (1 + noise * random.uniform(-1, 1))
        seconds = StepSeconds(0.0, 0.0, took - pause, 0.0, 0.0, 0.0)
        steps.append(
            StepRecord(
                at=at, number=n, seconds=seconds, shares=tuple(shares), adapters=adapters,
                running=decodes, waiting=0, kv_blocks_used=blocks, kv_blocks_total=9999,
                slots_used=8, slots_total=8, preemptions=0,
            )
        )  # fmt: skip
        at += took
        if random.random() < 0.1:  # nothing to do for a while
            at += 1.0
    return steps


def test_a_machine_that_became_slower_is_known_by_how_much():
    slow = make_steps(300, seed=1, costs=scaled(COSTS, 1.25))
    assert slowness(COSTS, make_steps(300), 16) == pytest.approx(1.0, rel=0.02)
    assert slowness(COSTS, slow, 16) == pytest.approx(1.25, rel=0.02)


def test_costs_are_found_again_pauses_included_and_idleness_not():
    fit = fit_steps(make_steps(600), block_size=16)
    for name in StepCosts.__struct_fields__:
        assert getattr(fit.costs, name) == pytest.approx(getattr(COSTS, name), rel=0.02, abs=2e-6)
    assert fit.mean_error < 0.01 and fit.num_steps == 600


def test_of_noisy_steps_all_together_take_what_they_took_and_no_cost_is_negative():
    steps = make_steps(400, noise=0.3)
    fit = fit_steps(steps, block_size=16)
    assert all(getattr(fit.costs, name) >= 0 for name in StepCosts.__struct_fields__)
    assert 0.05 < fit.mean_error < 0.3
    assert fit.costs.step == pytest.approx(COSTS.step, rel=0.3)


def test_few_steps_are_refused():
    with pytest.raises(ConfigError, match="49 steps are too few"):
        fit_steps(make_steps(49), block_size=16)


def test_steps_are_read_line_by_line_and_a_bad_line_is_named(tmp_path):
    file = tmp_path / "steps.jsonl"
    steps = make_steps(3)
    file.write_bytes(b"\n".join(map(msgspec.json.encode, steps)))
    assert read_steps(file) == steps
    file.write_text("[1]")
    with pytest.raises(ConfigError, match=r"steps.jsonl:1: "):
        read_steps(file)


def test_a_model_is_read_back_and_an_unknown_field_is_named(tmp_path):
    model = StepModel(
        costs=COSTS, mean_error=0.03, num_steps=9, num_kv_blocks=99, max_num_seqs=8,
        max_num_batched_tokens=64, max_model_len=128, max_loras=2,
    )  # fmt: skip
    file = tmp_path / "model.json"
    file.write_bytes(msgspec.json.encode(model))
    assert read_step_model(file) == model
    document = json.loads(file.read_text())
    document["costs"]["rows"] = 1
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="`rows`"):
        read_step_model(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_step_model(tmp_path / "none.json")


def test_adapters_cost_the_same_step_by_step_and_at_once():
    def run(*, quick):
        config = SchedulerConfig(num_kv_blocks=400, max_loras=3, max_num_seqs=8)
        simulation = Simulation(config, step_time=FittedStepTime(COSTS), quick=quick)
        for n in range(20):
            adapter = None if n % 4 == 0 else f"a{n % 5}"
            simulation.send(0.05 * n, request(n, [1] * 30, adapter=adapter, max_tokens=40))
        report = simulation.run()
        return report.seconds, [record.token_times for record in report.requests]

    assert run(quick=True) == run(quick=False)


def test_a_load_takes_its_median():
    assert median_seconds([0.1, 9.0, 0.2], 1.0) == 0.2
    assert median_seconds([], 0.03) == 0.03
