"""Many replicas behind a router, each the scheduler that serves, in several processes.

Every process draws all requests, routes all of them alike, and simulates its own replicas: the
router needs no word from them, so that processes need none from each other.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from engine.simulation.driver import Simulation
from engine.simulation.fleet_figures import FleetFigures
from engine.simulation.intervals import Sighting
from engine.simulation.routing import Routing, make_route
from engine.simulation.study import NamedPolicy, Study
from engine.simulation.workload import Drawn

WINDOW = 2000
"""Requests that are made ahead of the replicas' time; bounds memory."""
WATCHED = 0.95
"""Share of the expected time of arrivals in which alerts are looked for: later, load is falling."""
OnProgress = Callable[[int], None]
"""Called with the number of requests sent so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas, and what is sent to all of them together."""

    study: Study
    policy: NamedPolicy
    rate: float
    num_replicas: int
    routing: Routing = "affinity"
    seed: int = 0


def simulate_fleet(
    fleet: Fleet, *, num_processes: int = 1, on_progress: OnProgress = lambda done: None
) -> FleetFigures:
    """All replicas, shared among the processes. Raises ConfigError for what could not run."""
    fleet.study.config(fleet.policy)
    num_parts = min(num_processes, fleet.num_replicas)
    if num_parts == 1:
        return simulate_part(fleet, 0, 1, on_progress)
    context = get_context("spawn")
    done = [0] * num_parts
    found: list[FleetFigures] = []
    readers: dict[Connection, int] = {}
    processes = []
    try:
        for part in range(num_parts):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(writer, fleet, part, num_parts))
            process.start()
            writer.close()
            processes.append(process)
            readers[reader] = part
        while readers:
            for reader in wait(list(readers)):
                assert isinstance(reader, Connection)
                try:
                    told = reader.recv()
                except EOFError:
                    raise RuntimeError("a process of the simulation died") from None
                if isinstance(told, int):
                    done[readers[reader]] = told
                    on_progress(min(done))
                else:
                    found.append(told)
                    done[readers.pop(reader)] = fleet.study.num_requests
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return _merged(found)


def simulate_part(
    fleet: Fleet, part: int, num_parts: int, on_progress: OnProgress = lambda done: None
) -> FleetFigures:
    """The replicas whose number modulo `num_parts` is `part`, and their share of the requests."""
    study = fleet.study
    figures = FleetFigures(
        slo=study.slo,
        num_warm_up=int(study.warm_up * study.num_requests),
        service_seconds=0.0 if study.step_model is None else study.step_model.service_seconds,
    )
    replicas = {
        number: study.replica(fleet.policy, partial(figures.take, number))
        for number in range(part, fleet.num_replicas, num_parts)
    }
    expected = study.num_requests / fleet.rate
    watches = {
        number: study.watch(replica, study.warm_up * expected, WATCHED * expected)
        for number, replica in replicas.items()
    }
    route = make_route(fleet.routing, fleet.num_replicas)
    sent = 0
    for window in _windows(study.traffic(fleet.rate).draws(fleet.seed)):
        for drawn in window:
            tokens = drawn.num_prompt_tokens + 2.0 * drawn.num_output_tokens
            replica = replicas.get(route(drawn.at, drawn.adapter, tokens))
            if replica is not None:
                replica.send(drawn.at, drawn.request())
        for watch in watches.values():
            watch.advance(window[-1].at)
        sent += len(window)
        on_progress(sent)
    for number, watch in watches.items():
        watch.advance()
        figures.sightings += [Sighting(found, number) for found in watch.findings()]
        _add_totals(replicas[number], figures)
    return figures


def _add_totals(replica: Simulation, figures: FleetFigures) -> None:
    report = replica.report()
    figures.use.merge(report.use)
    figures.num_preemptions += report.num_preemptions
    figures.num_loads += report.num_loads
    figures.num_installs += report.num_installs
    figures.num_rows += report.num_rows


def _run(writer: Connection, fleet: Fleet, part: int, num_parts: int) -> None:
    writer.send(simulate_part(fleet, part, num_parts, writer.send))


def _windows(draws: Iterator[Drawn]) -> Iterator[Sequence[Drawn]]:
    while window := list(itertools.islice(draws, WINDOW)):
        yield window


def _merged(parts: Sequence[FleetFigures]) -> FleetFigures:
    merged = parts[0]
    for part in parts[1:]:
        merged.merge(part)
    return merged
