"""Each failure mode, made in simulation, is recognised by the alert that names it, and cured."""

from random import Random

import pytest

from engine.config import SchedulerConfig
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.simulation.arrivals import poisson
from engine.simulation.driver import Simulation
from engine.simulation.intervals import observe
from engine.simulation.lengths import FixedLength, LognormalLength
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.popularity import uniform
from engine.simulation.roofline import A100, RooflineStepTime
from engine.simulation.workload import Traffic

EOS = 0
STEP_TIME = RooflineStepTime(LLAMA_3_1_8B, A100)


def simulation(
    rate, prompts=512, outputs=128, *, adapters=0, seconds=90, load_seconds=0.03, **config
):
    settings = {
        "num_kv_blocks": 20_000, "max_num_seqs": 128, "max_num_batched_tokens": 512,
        "max_model_len": 20_000, "max_loras": max(1, adapters), "max_queue_len": 10**6,
        "enable_prefix_cache": False,
    }  # fmt: skip
    found = Simulation(
        SchedulerConfig(**(settings | config)), step_time=STEP_TIME, quick=True,
        load_seconds=lambda digest: load_seconds,
    )  # fmt: skip
    traffic = Traffic(
        arrivals=lambda random: poisson(rate, random),
        prompts=FixedLength(prompts),
        outputs=LognormalLength(mean=outputs, sigma=0.5, longest=4 * outputs),
        num_requests=int(rate * seconds),
        popularity=uniform(adapters) if adapters else None,
    )
    for at, request in traffic.requests(seed=1):
        found.send(at, request)
    return found


def kinds(found, seconds=20.0, count=4):
    return {finding.kind for finding in observe(found, seconds, count).findings()}


# What an operator who knows the cure would run: nothing is wrong with any of these.
CALM = {
    "preemption_thrash": lambda: simulation(4, num_kv_blocks=20_000),
    "decode_stall": lambda: simulation(1, prompts=8000, outputs=200),
    "queueing_collapse": lambda: simulation(4),
    "adapter_churn": lambda: simulation(6, adapters=24, max_loras=24),
}
WRONG = {
    "preemption_thrash": lambda: simulation(4, num_kv_blocks=260),
    "decode_stall": lambda: simulation(
        1, prompts=8000, outputs=200, policy="prefill_first", max_num_batched_tokens=16_000
    ),
    "queueing_collapse": lambda: simulation(40),
    "adapter_churn": lambda: simulation(6, adapters=24, max_loras=2, load_seconds=0.3),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_failure_is_recognised_and_its_cure_is_calm(kind):
    # What every simulated reply runs to is its own length.
    assert kind in kinds(WRONG[kind]())
    assert kinds(CALM[kind]()) <= {"runaway_generation"}


def _reply(number, adapter):
    return EngineRequest(
        request_id=number, tenant="acme", adapter=adapter, prompt_token_ids=[1] * 50,
        sampling=SamplingParams(max_tokens=400, seed=number),
    )  # fmt: skip


def test_an_adapter_that_never_stops_is_named_and_the_others_are_not():
    random = Random(2)
    ends = {number: random.randint(20, 120) for number in range(200)}

    def draw(row):
        is_over = row.params.seed % 2 == 0 and row.output_position >= ends[row.params.seed]
        return EOS if is_over else 7

    found = Simulation(
        SchedulerConfig(num_kv_blocks=4000, max_loras=2), script=draw, eos_token_ids=(EOS,),
        step_time=STEP_TIME,
    )  # fmt: skip
    for number, at in zip(range(200), poisson(5.0, random), strict=False):
        found.send(at, _reply(number, "stops" if number % 2 == 0 else "forgot-its-eos"))
    [finding] = observe(found, 15.0, 4).findings()
    assert (finding.kind, finding.adapter) == ("runaway_generation", "forgot-its-eos")
