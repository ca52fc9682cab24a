"""A quick simulation is a step-by-step one, to the last bit."""

import random

import pytest

from engine.config import SchedulerConfig
from engine.simulation.driver import Simulation
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.roofline import H100, RooflineStepTime
from engine.simulation.step_time import LinearStepTime
from tests.support.memory_engine import request

NUM_RUNS = 15
POLICIES = ["chunked", "prefill_first", "static"]


def _simulation(rng, policy, *, quick):
    config = SchedulerConfig(
        num_kv_blocks=rng.choice([40, 90, 400]),
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=rng.choice([8, 24, 64]),
        max_model_len=120,
        max_loras=rng.choice([1, 3]),
        max_queue_len=rng.choice([20, 4096]),
        policy=policy,
        enable_prefix_cache=rng.random() < 0.3,
        output_weight=rng.choice([2.0, 0.3]),
        slot_debt_tokens=rng.choice([None, 30]),
    )
    step_time = rng.choice(
        [LinearStepTime(), RooflineStepTime(LLAMA_3_1_8B, H100, policy == "static")]
    )
    loads = {f"a{k}": rng.choice([0.0, 0.03, 0.4]) for k in range(4)} | {"a4": None}
    return Simulation(
        config, step_time=step_time, load_seconds=loads.__getitem__, max_cpu_loras=2,
        num_readers=2, install_seconds=0.001, quick=quick,
    )  # fmt: skip


def _run(seed, policy, *, quick):
    """Outcomes at several stops, and how many steps there were."""
    rng = random.Random(seed)
    simulation = _simulation(rng, policy, quick=quick)
    num_queues = rng.choice([1, 1, 6])
    now = 0.0
    for number in range(40):
        now += rng.expovariate(1.0) * rng.choice([0.0, 0.05, 2.0])
        queue = rng.randrange(num_queues)
        tenant = queue % 3
        simulation.send(
            now,
            request(
                number, [queue + 1] * rng.randint(1, 60), tenant=f"t{tenant}",
                adapter=None if queue == 0 else f"a{queue - 1}",
                max_tokens=rng.choice([1, 2, 9, 60, 150]),
                n=rng.choice([1, 1, 1, 2]), weight=(1.0, 3.0, 0.5)[tenant],
                max_concurrent=(None, 3, None)[tenant],
                stop_token_ids=(1,) if rng.random() < 0.1 else (),
            ),
        )  # fmt: skip
        if rng.random() < 0.1:
            simulation.abort(now + rng.random(), number)
    if rng.random() < 0.3:
        simulation.pin(now / 2, frozenset({"a0"} if simulation.config.max_loras > 1 else ()))
    seen = []
    for stop in (now / 3, now / 2, None):
        report = simulation.run(until=stop)
        simulation.core.check_integrity()
        seen.append(
            [
                (
                    r.queued, r.first_token, r.finished, r.finish_reason, r.error_code, r.timing,
                    r.num_cached_tokens, r.num_output_tokens, tuple(r.token_times),
                )
                for r in report.requests
            ]
        )  # fmt: skip
        totals = (
            report.seconds, report.num_steps, report.num_rows, report.num_preemptions,
            report.num_loads, report.num_installs,
        )  # fmt: skip
        seen.append((*totals, simulation.core.stats()))
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_a_quick_simulation_gives_the_same_report_at_every_stop(policy):
    for seed in range(NUM_RUNS):
        quick, step_by_step = (_run(seed, policy, quick=quick) for quick in (True, False))
        for a, b in zip(quick, step_by_step, strict=True):
            assert a == b, f"seed {seed}"


@pytest.mark.parametrize("policy", POLICIES)
def test_decodes_in_which_nothing_can_happen_are_taken_at_once(policy):
    config = SchedulerConfig(
        num_kv_blocks=2000, max_num_seqs=8, policy=policy, enable_prefix_cache=False
    )
    simulation = Simulation(config, quick=True)
    core_steps = []
    step = simulation.core.step
    simulation.core.step = lambda: core_steps.append(1) or step()
    for number in range(8):
        simulation.send(0.0, request(number, [1] * 10, max_tokens=1000))
    simulation.send(1.0, request(9, [1] * 10, max_tokens=5))
    report = simulation.run()
    assert report.num_steps > 1000 and len(core_steps) < 20


@pytest.mark.parametrize("option", ["script", "observe", "after_step"])
def test_a_quick_simulation_shows_no_batches(option):
    with pytest.raises(ValueError, match="nothing to observe"):
        Simulation(SchedulerConfig(num_kv_blocks=9), quick=True, **{option: lambda *_: 0})
    with pytest.raises(ValueError, match="by load"):
        Simulation(SchedulerConfig(num_kv_blocks=9), quick=True, step_time=lambda batch: 1.0)
