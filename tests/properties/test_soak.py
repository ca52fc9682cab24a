"""A day and more of everything at once, in simulated time: at its end all is as at its beginning.

The simulation is `tests.support.simulated_service`. Each hour has bursts of requests of tenants
that come and go, and then a quiet time in which everything must come to rest.
"""

import gc
import logging
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
import structlog

from engine.telemetry.residence import Fetch
from tests.support.memory_engine import request
from tests.support.simulated_service import CONFIG, Simulation

HOURS = 25
BUSY_SECONDS, HOUR = 3000.0, 3600.0
NAMES = ("alpha", "beta", "gamma")
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6] * 6, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 5, [7] * 50)


class Day:
    """What the tenants and clients of a simulation do, hour by hour."""

    def __init__(self, simulation: Simulation) -> None:
        self._service = simulation
        self._random = simulation.random

    def run_hour(self, hour: int) -> None:
        """Fifty minutes of load, ten of quiet."""
        service, draw = self._service, self._random
        start = service.clock.now
        tenants = ["everlasting", *(f"tenant-{hour}-{number}" for number in range(4))]
        for _ in range(6):
            at = draw.uniform(0, BUSY_SECONDS - 300)
            for _ in range(120):
                service.after(at + draw.uniform(0, 240), lambda: self._ask(draw.choice(tenants)))
        for action, times in (
            (lambda: service.upload(draw.choice(tenants), draw.choice(NAMES)), 25),
            (lambda: service.delete(draw.choice(tenants), draw.choice(NAMES)), 12),
            (lambda: service.pin(draw.randrange(3), draw.randrange(3)), 6),
            (lambda: service.lose_client(draw.choice(["c0", "c1"])), 3),
            (service.crash, 2),
        ):
            for _ in range(times):
                service.after(draw.uniform(0, BUSY_SECONDS), action)
        service.run_until(start + HOUR)

    def clear_up(self) -> None:
        """Delete every adapter, and fill the prefix cache with one prompt that is always equal."""
        service = self._service
        service.parts.residency.set([], [])
        for tenant, name in list(service.versions):
            service.delete(tenant, name)
        for stray in [path.name for path in (service._cache).iterdir() if len(path.name) == 64]:
            service.parts.core.unload(stray)
        length = CONFIG.max_sequence_len - 1
        # One after another, so that each lifts the floor of the counters, until it has passed every
        # tenant's: the more a tenant had, the more that takes. What is cached counts for nothing.
        for salt in range(400):
            message = request(
                service.next_request_id(), [salt % 2] * length, tenant="last", max_tokens=1
            )
            service.ask("c0", message)
            service.run_until(service.clock.now + (600 if salt < 8 else 10))
            if salt >= 7 and salt % 2 and not service.counts()["tenants"]:
                break
        gc.collect()

    def _ask(self, tenant: str) -> None:
        service, draw = self._service, self._random
        adapter = service.versions.get((tenant, draw.choice(NAMES)))
        if adapter is None and draw.random() < 0.7:
            adapter = service.upload(tenant, draw.choice(NAMES))
        message = request(
            service.next_request_id(),
            draw.choice(PROMPTS)[: draw.randint(1, 50)],
            tenant=tenant,
            adapter=adapter,
            max_tokens=draw.choice([1, 8, 24, 60]),
            n=draw.choice([1, 1, 1, 2, 4]),
            ignore_eos=draw.random() < 0.5,
            max_concurrent=draw.choice([None, None, 4]),
            weight=draw.choice([1.0, 2.0]),
        )
        key = service.ask(draw.choice(["c0", "c1"]), message)
        if key is not None and draw.random() < 0.15:
            service.after(draw.choice([0.0, 0.5, 5.0, 60.0]), lambda: service.abort(key))


def census() -> Counter[str]:
    """Objects of the engine that are alive, by class.

    Without how adapters came to host memory, which telemetry knows of the last few thousand until
    they come into a slot.
    """
    return Counter(
        type(thing).__qualname__
        for thing in gc.get_objects()
        if str(type(thing).__module__).startswith("engine.") and not isinstance(thing, Fetch)
    )


def num_bytes() -> int:
    """Bytes of all containers that the collector knows; what they hold is in proportion."""
    return sum(map(sys.getsizeof, gc.get_objects()))


@pytest.fixture
def _quiet() -> Generator[None]:
    """A day's warnings of adapters that could not be had would fill the report."""
    level = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=level)
    yield
    structlog.reset_defaults()


@pytest.fixture
def service(tmp_path: Path) -> Generator[Simulation]:
    simulation = Simulation(tmp_path, seed=1, step_seconds=0.25)
    yield simulation
    simulation.parts.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_quiet")
def test_after_a_day_of_everything_each_count_is_as_it_was_and_memory_is_flat(service: Simulation):
    day = Day(service)
    day.clear_up()
    counts_before, census_before = service.counts(), census()
    bytes_by_hour: list[int] = []
    for hour in range(HOURS):
        day.run_hour(hour)
        counts = service.counts()
        for name in ("requests", "running", "waiting", "blocks", "copies", "reservations"):
            assert counts[name] == 0, f"{name} in the quiet of hour {hour}: {counts}"
        gc.collect()
        bytes_by_hour.append(num_bytes())
    assert service.clock.now >= 24 * HOUR
    day.clear_up()
    assert service.counts() == counts_before
    assert census() == census_before
    warm, late = min(bytes_by_hour[2:6]), min(bytes_by_hour[-4:])
    assert late <= 1.01 * warm, bytes_by_hour
    for event in (
        "answered", "cached", "preempted", "swap", "delete", "aborted", "aborted late", "pinned",
        "client lost", "crash under load", "read", "damaged", "adapter unavailable",
    ):  # fmt: skip
        assert service.happened[event] >= 10, (event, service.happened)
