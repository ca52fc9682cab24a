"""Each failure mode, made in simulation, is recognised by the alert that names it, and cured."""

from dataclasses import replace
from random import Random

import pytest

from engine.config import SchedulerConfig
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.simulation.arrivals import poisson
from engine.simulation.driver import Simulation
from engine.simulation.failure_modes import FAILURE_MODES, jobs, recognise
from engine.simulation.fleet import Fleet, simulate_part
from engine.simulation.intervals import AlertWatch
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.roofline import A100, RooflineStepTime
from engine.simulation.study import run_jobs

EOS = 0
STEP_TIME = RooflineStepTime(LLAMA_3_1_8B, A100)


@pytest.fixture(scope="module")
def rows():
    return list(run_jobs(jobs()))


def test_each_failure_is_recognised_and_its_cure_is_silent(rows):
    found = recognise(rows)
    assert [one.mode.kind for one in found if not one.holds] == []
    assert len({one.mode.kind for one in found}) == 5


def test_what_is_found_is_in_a_row_with_its_figures(rows):
    [row] = [row for row in rows if row.policy == "queueing_collapse"]
    [found] = row.as_dict()["findings"]
    assert (found["kind"], found["severity"], found["replica"]) == (
        "queueing_collapse", "critical", 0,
    )  # fmt: skip
    assert {"name", "value", "unit", "limit"} == found["figures"][0].keys()


def test_a_fleet_tells_which_of_its_replicas_fail():
    churn = next(mode for mode in FAILURE_MODES if mode.kind == "adapter_churn")
    for case, expected in ((churn.wrong, {0, 1}), (churn.cured, set())):
        fleet = Fleet(
            study=replace(case.study, num_requests=round(2 * case.rate * 150)),
            policy=case.policy, rate=2 * case.rate, num_replicas=2, routing="round_robin",
        )  # fmt: skip
        found = simulate_part(fleet, 0, 1).sightings
        kinds = {s.replica for s in found if s.finding.kind == "adapter_churn"}
        assert kinds == expected


def test_what_ends_after_the_last_interval_is_not_counted():
    simulation = Simulation(SchedulerConfig(num_kv_blocks=4000, max_loras=0), step_time=STEP_TIME)
    for number in range(40):
        simulation.send(0.0, _reply(number, None))
    watch = AlertWatch(simulation, begins=0.0, seconds=0.1)
    watch.advance()
    assert watch.findings() == [] and len(simulation.report().requests) == 40


def test_a_run_without_duration_finds_nothing():
    simulation = Simulation(SchedulerConfig(num_kv_blocks=4000, max_loras=0), step_time=STEP_TIME)
    simulation.send(0.0, _reply(0, None))
    watch = AlertWatch(simulation, begins=0.0, seconds=0.0)
    watch.advance()
    assert watch.findings() == [] and simulation.records[0].finish_reason == "length"


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
    watch = AlertWatch(found, begins=0.0, seconds=60.0)
    watch.advance(60.0)
    [finding] = watch.findings()
    assert (finding.kind, finding.adapter) == ("runaway_generation", "forgot-its-eos")


def _reply(number, adapter):
    return EngineRequest(
        request_id=number, tenant="acme", adapter=adapter, prompt_token_ids=[1] * 50,
        sampling=SamplingParams(max_tokens=400, seed=number),
    )  # fmt: skip
