"""Plans: enough replicas for the demand, no more than it takes, at the rate where goodput peaks."""

from dataclasses import replace
from itertools import starmap

import pytest

from engine.errors import ConfigError
from engine.simulation.figures import Slo
from engine.simulation.fleet_figures import FleetFigures
from engine.simulation.lengths import FixedLength
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.plan import Demand, Setup, Trial, attempt, operating_point, plan
from engine.simulation.popularity import uniform
from engine.simulation.roofline import H100
from engine.simulation.study import Study

STUDY = Study(
    model=LLAMA_3_1_8B, gpu=H100, prompts=FixedLength(600), outputs=FixedLength(20),
    num_requests=150, max_model_len=1024, slo=Slo(0.3, 0.03),
)  # fmt: skip


def run(jobs):
    return list(starmap(attempt, jobs))


@pytest.fixture(scope="module")
def small():
    return plan(Demand(study=STUDY, rate=150.0), run)


def test_a_plan_meets_its_slo_at_the_demand(small):
    assert small.meets_slo and small.expected.figures.goodput >= 0.95
    assert small.expected.setup.rate * small.num_replicas == pytest.approx(150.0)
    assert small.by_slots == () and small.max_loras == 0


def test_the_operating_point_is_the_most_good_of_what_meets_the_share(small):
    good = [trial for trial in small.by_load if trial.figures.goodput >= 0.95]
    assert small.operating in good
    assert small.operating.good_per_second == max(trial.good_per_second for trial in good)
    assert small.by_load[-1].figures.goodput < small.operating.figures.goodput


def test_more_demand_takes_more_replicas_and_costs_the_same_for_a_token(small):
    large = plan(Demand(study=STUDY, rate=1500.0), run)
    assert 7 <= large.num_replicas / small.num_replicas <= 11
    assert large.gpu_hours_per_million == pytest.approx(small.gpu_hours_per_million, rel=0.4)


def test_the_whole_demand_is_tried_on_more_than_a_lucky_pair():
    demand = Demand(study=replace(STUDY, popularity=uniform(6), num_requests=40), rate=1.0)
    setup = Setup(num_replicas=6, max_num_seqs=16, max_loras=2, rate=5.0)
    pair, all_ = attempt(demand, setup), attempt(demand, replace(setup, num_sampled=8))
    assert (pair.num_sampled, all_.num_sampled) == (2, 6)
    assert pair.figures.num_requests < all_.figures.num_requests
    assert all_.figures.num_requests == pytest.approx(6 * 40 * 0.9)


def test_seats_and_slots_are_the_fewest_that_do_as_well():
    study = replace(STUDY, popularity=uniform(6), num_tenants=3, adapter_rank=64)
    found = plan(Demand(study=study, rate=40.0), run)
    best = max(trial.figures.goodput for trial in found.by_slots)
    enough = [t.setup.max_loras for t in found.by_slots if t.figures.goodput >= best - 0.005]
    assert found.max_loras == min(enough) <= 6
    assert {trial.setup.max_loras for trial in found.by_slots} == {2, 4, 6}
    assert found.max_num_seqs in {trial.setup.max_num_seqs for trial in found.by_seats}


def test_where_nothing_meets_the_share_the_most_that_does_is_told():
    def trial(rate, good):
        figures = FleetFigures(slo=Slo(), num_requests=100, num_good=good)
        setup = Setup(num_replicas=1, max_num_seqs=8, max_loras=0, rate=rate)
        return Trial(setup, figures, 1)

    trials = [trial(1.0, 60), trial(2.0, 80), trial(3.0, 70)]
    assert operating_point(trials, 0.95).setup.rate == 2.0
    assert operating_point(trials, 0.7).setup.rate == 3.0


def test_a_model_that_does_not_fit_is_refused_by_name():
    study = replace(STUDY, gpu=replace(H100, memory=10e9))
    with pytest.raises(ConfigError, match=r"llama-3.1-8b"):
        plan(Demand(study=study, rate=1.0), run)
