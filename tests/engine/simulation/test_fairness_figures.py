"""How evenly tenants were served, and what other orders of service do to them."""

import pytest

from engine.config import SchedulerConfig
from engine.messages import RequestTiming
from engine.simulation.driver import Simulation
from engine.simulation.fairness_figures import Fairness, fairness
from engine.simulation.record import SimulatedRequest
from tests.support.memory_engine import request


def record(number, tenant, arrival, times=(), *, prompt, prefill=0.0, max_tokens=9):
    return SimulatedRequest(
        request(number, [1] * prompt, tenant=tenant, max_tokens=max_tokens), arrival,
        first_token=times[0] if times else None, token_times=list(times),
        timing=RequestTiming(queue={}, prefill=prefill, decode=0.0) if times else None,
    )  # fmt: skip


def test_service_and_waits_are_counted_within_the_interval():
    found = fairness(
        [
            record(0, "queues", 5, (12.0, 13.0, 25.0), prompt=10, prefill=1.0),
            record(1, "queues", 6, prompt=10),
            record(2, "starves", 9, prompt=10),
            record(3, "light", 15, (15.5, 16.0), prompt=2, prefill=0.5, max_tokens=2),
            record(4, "heavy", 12, (19.0,), prompt=50, prefill=2.0, max_tokens=50),
            record(5, "heavy", 21, (99.0,), prompt=50, prefill=2.0),
        ],
        10,
        20,
    )
    assert found == Fairness(
        num_backlogged=2, num_unserved=1, jain=0.5, service_difference=10 + 2 * 2,
        longest_wait=7.0, longest_light_wait=0.5,
    )  # fmt: skip


def test_a_run_without_waits_has_nothing_to_compare():
    empty = fairness([], 0, 1)
    assert (empty.num_backlogged, empty.jain, empty.longest_wait) == (0, 1.0, 0.0)


@pytest.mark.parametrize(("order", "num_before"), [("fcfs", 12), ("fair", 2)])
def test_whoever_came_late_and_asked_for_little_waits_by_the_order_of_service(order, num_before):
    config = SchedulerConfig(num_kv_blocks=400, max_num_seqs=2, enable_prefix_cache=False)
    simulation = Simulation(config, quick=True, order=order)
    for number in range(12):
        simulation.send(0.0, request(number, [1] * 20, tenant="heavy", max_tokens=10))
    light = simulation.send(0.01, request(12, [1] * 20, tenant="light", max_tokens=10))
    records = simulation.run().requests
    assert sum(one.first_token < light.first_token for one in records) == num_before
