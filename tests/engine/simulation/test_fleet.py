"""Fleets: who gets a request, and figures that are summed as requests end."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.simulation.figures import Slo
from engine.simulation.fleet import Fleet, simulate_fleet, simulate_part
from engine.simulation.lengths import FixedLength, LognormalLength
from engine.simulation.log_histogram import ACCURACY, LogHistogram, merged
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.popularity import one_hot, zipf
from engine.simulation.roofline import H100
from engine.simulation.routing import SLACK, AffinityRouter, make_route
from engine.simulation.study import CHUNKED_512, Study, simulate

STUDY = Study(
    model=LLAMA_3_1_8B, gpu=H100, num_requests=300, popularity=zipf(40), num_tenants=5,
    max_loras=4, warm_up=0.0,
    prompts=LognormalLength(mean=200, sigma=0.8, longest=2000),
    outputs=LognormalLength(mean=40, sigma=0.8, longest=300), max_model_len=2400,
)  # fmt: skip


def fleet(**fields):
    return Fleet(study=STUDY, policy=CHUNKED_512, rate=60.0, num_replicas=5, **fields)


@given(
    values=st.lists(st.floats(0, 1e5), min_size=1, max_size=200),
    share=st.floats(0.01, 1),
)
def test_a_quantile_is_within_a_percent_of_an_exact_one(values, share):
    one, all_ = LogHistogram(), LogHistogram()
    for value in values:
        one.add(value)
    all_.add_all(np.array(values))
    exact = sorted(values)[max(1, int(np.ceil(share * len(values)))) - 1]
    for histogram in (one, all_):
        assert histogram.quantile(share) == pytest.approx(exact, rel=ACCURACY + 1e-6, abs=2e-6)
        assert histogram.count == len(values)
        assert histogram.mean == pytest.approx(np.mean(values))
    assert (one.counts == all_.counts).all()
    assert merged([one, all_]).count == 2 * len(values)


def test_nothing_has_no_quantiles():
    empty = LogHistogram()
    empty.add_all(np.empty(0))
    assert (empty.quantile(0.5), empty.mean, empty.count) == (0.0, 0.0, 0)


def test_an_adapter_stays_on_its_replica_until_that_is_busier_than_the_others():
    route = AffinityRouter(8)
    quiet = {route(0.1 * n, f"a{n % 100}", 1.0) for n in range(0, 1000, 100)}
    assert quiet == {route.order("a0")[0]}
    busy = Counter(route(100 + 0.01 * n, "hot", 5000.0) for n in range(2000))
    assert set(busy) == set(range(8))  # all that is asked for is one adapter
    assert max(busy.values()) <= (SLACK + 0.05) * 2000 / 8


def test_a_new_replica_takes_only_its_share_of_adapters():
    before, after = AffinityRouter(8), AffinityRouter(9)
    moved = [
        after.order(f"a{n}")[0]
        for n in range(900)
        if before.order(f"a{n}")[0] != after.order(f"a{n}")[0]
    ]
    assert set(moved) == {8} and 60 < len(moved) < 145


def test_requests_for_the_base_go_where_the_load_is_least():
    route = make_route("affinity", 4)
    assert sorted(route(0.0, None, 10.0) for _ in range(4)) == [0, 1, 2, 3]
    assert [make_route("round_robin", 3)(0.0, "a", 1.0)] * 2 == [0, 0]
    with pytest.raises(ValueError, match="at least one replica"):
        make_route("affinity", 0)


def test_a_routers_memory_fades_and_never_overflows():
    route = AffinityRouter(2)
    first = route(0.0, None, 1e9)
    assert route(0.0, None, 1.0) != first
    assert route(1e6, None, 1.0) in (0, 1)
    assert {route(1e6, None, 1.0) for _ in range(2)} == {0, 1}


def test_parts_of_a_fleet_sum_to_the_whole_in_any_number_of_processes():
    whole = simulate_part(fleet(), 0, 1)
    told = []
    parts = simulate_fleet(fleet(), num_processes=2, on_progress=told.append)
    for figures in (whole, parts):
        assert figures.num_requests == STUDY.num_requests
        assert sum(figures.replicas.values()) == figures.num_output_tokens
        assert sum(t.num_requests for t in figures.adapters.values()) == STUDY.num_requests
    assert (whole.ttft.counts == parts.ttft.counts).all()
    assert whole.replicas == parts.replicas and whole.num_loads == parts.num_loads
    assert whole.jain == pytest.approx(parts.jain)
    assert told and told[-1] == STUDY.num_requests


def test_one_replica_has_the_figures_of_a_single_simulation():
    one = replace(fleet(), num_replicas=1)
    found = simulate_part(one, 0, 1).as_figures(STUDY.kv_blocks)
    exact = simulate(STUDY, CHUNKED_512, 60.0, 0).figures
    assert found.num_loads == exact.num_loads
    assert found.output_tokens_per_second == pytest.approx(exact.output_tokens_per_second)
    assert found.goodput == exact.goodput
    assert found.queue_ms == pytest.approx(exact.queue_ms)
    for field in ("ttft_p99_ms", "tpot_p50_ms", "gap_p99_ms"):
        assert getattr(found, field) == pytest.approx(getattr(exact, field), rel=0.05)


def test_affinity_loads_fewer_adapters_than_taking_turns():
    turns = simulate_part(fleet(routing="round_robin"), 0, 1)
    assert simulate_part(fleet(), 0, 1).num_loads < 0.7 * turns.num_loads


def test_what_could_not_run_is_refused_before_a_process_starts():
    study = replace(STUDY, gpu=replace(H100, memory=1e9))
    with pytest.raises(ConfigError, match="does not fit"):
        simulate_fleet(replace(fleet(), study=study), num_processes=2)


def test_an_order_of_service_that_is_loyal_to_its_slots_starves_the_others():
    waits = {}
    for order in ("fair", "resident_first"):
        study = replace(
            STUDY, order=order, max_loras=1, popularity=one_hot(10, 0.8), num_tenants=10,
            prompts=FixedLength(300), num_requests=200, slo=Slo(),
        )  # fmt: skip
        waits[order] = simulate(study, replace(CHUNKED_512, max_num_seqs=8), 40.0, 0).figures
    assert waits["resident_first"].num_installs < waits["fair"].num_installs
    assert waits["resident_first"].ttft_p50_ms < waits["fair"].ttft_p50_ms
