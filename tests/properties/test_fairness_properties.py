"""What docs/scheduler.md promises, in simulated time: random arrivals, aborts and preemptions."""

import os
import random
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.scheduling.fairness_bounds import claim_service, counter_gap, step_service
from engine.simulation.driver import Simulation
from tests.support.memory_engine import request

STEP, LOAD = 1.0, 2.5
STEPS_OF_A_LOAD = 3
SETTINGS = settings(
    max_examples=int(os.environ.get("LORAPLEX_TEST_EXAMPLES", "25")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class Watch:
    """Looks at a simulation before each batch, and after each step."""

    def __init__(self) -> None:
        self.waited: dict[int, float] = defaultdict(float)
        """By request id: seconds in which none of its sequences ran."""
        self.largest_gap = {"tenants": 0.0, "adapters": 0.0}
        self.num_slot_claims = 0
        self.num_adapters = 0
        self._claims: dict[object, tuple[int, float]] = {}
        self._waiting: tuple[float, list[int]] = (0.0, [])
        self._seen: set[int] = set()

    def before_batch(self, simulation, batch) -> None:
        scheduler = simulation.core._scheduler
        lifecycle = scheduler._lifecycle
        lifecycle.check_integrity()
        slots = {row.slot for row in batch.rows} - {None}
        assert len(slots) <= simulation.config.max_loras
        self.num_adapters = max(self.num_adapters, len(slots))
        self._account_waits(simulation, lifecycle)
        self._compare_counters(simulation.config, lifecycle.waiting)
        self._time_claims(simulation.config, lifecycle.gate)

    def _account_waits(self, simulation, lifecycle) -> None:
        now = simulation.clock.now
        since, waiting = self._waiting
        for request_id in waiting:
            self.waited[request_id] += now - since
        running = {s.request.key.request_id for s in lifecycle.running}
        still = []
        for request_id, record in simulation.records.items():
            if record.queued is None or record.finished is not None:
                continue
            if request_id not in self._seen:  # came since the last batch
                self._seen.add(request_id)
                self.waited[request_id] += now - record.queued
            if request_id not in running:
                still.append(request_id)
        self._waiting = now, still

    def _compare_counters(self, config, waiting) -> None:
        bound = counter_gap(config, steps_of_a_load=STEPS_OF_A_LOAD)
        tenants = [t for t in waiting.tenants.values() if t.num_waiting and not t.is_held]
        self._note("tenants", tenants, bound)
        for tenant in tenants:
            self._note("adapters", [q for q in tenant.queues.values() if q], bound)

    def _note(self, level, members, bound) -> None:
        if len(members) > 1:
            counters = [member.counter for member in members]
            gap = max(counters) - min(counters)
            assert gap <= bound, f"{level} are {gap} apart, more than {bound}"
            self.largest_gap[level] = max(self.largest_gap[level], gap)

    def _time_claims(self, config, gate) -> None:
        served = gate._debt._served
        claims = list(gate._claims.values())
        for claim in [claim for claim in self._claims if claim not in claims]:
            ahead, before = self._claims.pop(claim)
            assert served - before <= claim_service(config, claims_ahead=ahead) + step_service(
                config
            )
        for ahead, claim in enumerate(claims):
            self.num_slot_claims += claim not in self._claims
            self._claims.setdefault(claim, (ahead, served))


def _simulate(rng: random.Random, *, num_requests: int, weights: tuple[float, ...], **fields):
    config = SchedulerConfig(
        **{
            "num_kv_blocks": rng.choice([16, 24, 64]),
            "block_size": 4,
            "max_num_seqs": rng.randint(2, 6),
            "max_num_batched_tokens": rng.choice([8, 16, 48]),
            "max_model_len": 48,
            "max_loras": rng.randint(1, 4),
            "slot_debt_tokens": rng.choice([0, 40, None]),
            "enable_prefix_cache": rng.random() < 0.5,
            "attention_context": rng.choice([None, 8]),
        }
        | fields
    )
    watch = Watch()
    simulation = Simulation(
        config,
        step_time=lambda batch: STEP,
        load_seconds=lambda digest: LOAD,
        num_readers=8,
        vocab_size=100,
        observe=watch.before_batch,
    )
    at = 0.0
    for number in range(num_requests):
        at += rng.choice([0.0, 0.0, 0.0, 1.0, 6.0])
        tenant = rng.randrange(3)
        simulation.send(
            at,
            request(
                number,
                [rng.randint(1, 3) for _ in range(rng.randint(1, 24))],
                tenant=f"t{tenant}",
                adapter=rng.choice([None, "a", "b", "c", "d", "e"]),
                max_tokens=rng.randint(1, 20),
                n=rng.choice([1, 1, 1, 2]),
                weight=weights[tenant],
            ),
        )
        if rng.random() < 0.15:
            simulation.abort(at + rng.uniform(0, 30), number)
    return simulation, watch


@SETTINGS
@given(seed=st.integers(0, 10**6))
def test_counters_claims_slots_and_waits_keep_their_bounds_whatever_arrives(seed):
    simulation, watch = _simulate(random.Random(seed), num_requests=60, weights=(1.0, 1.0, 1.0))
    report = simulation.run(until=20_000)
    simulation.core.check_integrity()
    stats = simulation.core.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    for record in report.requests:
        assert record.finished is not None, "everything ends"
        if record.timing is None:
            continue
        assert min(record.queue.values(), default=1.0) > 0
        if record.request.sampling.n == 1 and record.finish_reason != "abort":
            waited = sum(record.queue.values())
            assert waited == pytest.approx(watch.waited[record.request.request_id], abs=1e-6)
            if not record.timing.preemptions:
                assert waited == pytest.approx(record.first_admitted - record.queued, abs=1e-6)
    for adapter, causes in report.queue_seconds_by_adapter().items():
        of_requests = [
            sum(r.queue.values()) for r in report.requests if r.request.adapter == adapter
        ]
        assert sum(causes.values()) == pytest.approx(sum(of_requests), abs=1e-6)


@SETTINGS
@given(seed=st.integers(0, 10**6))
def test_with_weights_and_quotas_everything_ends_too(seed):
    rng = random.Random(seed)
    simulation, _ = _simulate(rng, num_requests=40, weights=(0.5, 1.0, 4.0))
    simulation.runner._observe = None
    report = simulation.run(until=20_000)
    simulation.core.check_integrity()
    assert all(record.finished is not None for record in report.requests)


def test_the_properties_above_are_met_with_preemptions_claims_and_full_slots():
    num_preemptions = num_claims = 0
    gaps = defaultdict(float)
    for seed in range(12):
        simulation, watch = _simulate(
            random.Random(seed), num_requests=60, weights=(1.0, 1.0, 1.0), num_kv_blocks=16
        )
        num_preemptions += simulation.run().num_preemptions
        num_claims += watch.num_slot_claims
        assert watch.num_adapters <= simulation.config.max_loras
        for level, gap in watch.largest_gap.items():
            gaps[level] = max(gaps[level], gap)
    assert num_preemptions > 100 and num_claims > 50
    assert min(gaps["tenants"], gaps["adapters"]) > 10


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_backlogged_tenants_get_their_shares_of_slots_and_seats(weights):
    """The bound allows for the worst of steps; over many of them the shares have to be right."""
    config = SchedulerConfig(
        num_kv_blocks=200, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=48, max_loras=2, slot_debt_tokens=64,
    )  # fmt: skip
    simulation = Simulation(
        config, step_time=lambda batch: STEP, load_seconds=lambda digest: LOAD, vocab_size=100
    )
    rng = random.Random(5)
    for number in range(1600):
        tenant = int(number % 8 == 0)
        simulation.send(
            0.0,
            request(
                number,
                [1 + number % 90] * rng.randint(1, 12),
                tenant=f"t{tenant}",
                adapter=f"{tenant}-{rng.randrange(3)}",
                weight=weights[tenant],
                max_tokens=rng.randint(1, 24 if tenant else 6),
            ),
        )
    report = simulation.run(until=700.0)
    assert {r.request.tenant for r in report.requests if r.first_token is None} == {"t0", "t1"}
    service = [0.0, 0.0]
    for record in report.requests:
        if record.first_token is not None:
            tenant = int(record.request.tenant[1:])
            service[tenant] += len(record.request.prompt_token_ids) + 2 * record.num_output_tokens
    share = (service[0] / weights[0]) / (service[1] / weights[1])
    assert 0.8 < share < 1.25 and min(service) > 1000
