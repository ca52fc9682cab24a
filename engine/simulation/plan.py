"""How many replicas, seats and slots a deployment needs, and where to run it: by simulation.

    found = plan(Demand(study=study, rate=120.0), run)

The operating point is where goodput peaks: the rate of a replica at which most requests a second
meet the SLO, among those at which at least `share` of them do. Throughput peaks at a higher rate,
where queues are long. Of a large fleet only some replicas are simulated, with the requests that the
router gives them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.simulation.fleet import Fleet, simulate_part
from engine.simulation.fleet_figures import FleetFigures
from engine.simulation.study import NamedPolicy, Study

LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.1, 1.2, 1.35, 1.5)
"""Rates to try, as shares of the rate at which a replica serves a short burst."""
SIZING_LOAD = 0.8
SEATS = (16, 32, 64, 128, 256, 512)
SLOTS = (2, 4, 8, 16, 32, 64, 128)
NUM_SAMPLED = 2
"""Replicas of a large fleet that are simulated at least, to compare setups."""
NUM_CONFIRMED = 8
"""The same for the whole demand: a router spreads adapters unevenly, so two might be lucky."""
INDIFFERENT = 0.005
"""Relative differences of goodput that are not worth a seat or a slot."""
MAX_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be served, and how well."""

    study: Study
    """`num_requests` are those of one replica."""
    rate: float
    """Requests a second over all replicas."""
    share: float = 0.95
    """Share of the requests that must meet the SLO."""
    max_num_batched_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A fleet to try."""

    num_replicas: int
    max_num_seqs: int
    max_loras: int
    rate: float
    """Of one replica."""
    num_sampled: int = NUM_SAMPLED
    """Replicas that are simulated at least, if there are that many."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A setup, and the figures of the replicas that were simulated."""

    setup: Setup
    figures: FleetFigures
    num_sampled: int

    @property
    def tokens_per_second(self) -> float:
        """Of one replica."""
        return self.figures.output_tokens_per_second / self.num_sampled

    @property
    def good_per_second(self) -> float:
        """Requests of one replica that meet the SLO."""
        return self.setup.rate * self.figures.goodput

    @property
    def offered_tokens_per_second(self) -> float:
        """Output tokens that its requests ask of one replica, in the long run."""
        return self.setup.rate * self.figures.num_output_tokens / max(1, self.figures.num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to deploy. Replicas are of one GPU, or of one machine that was measured."""

    num_replicas: int
    max_num_seqs: int
    max_loras: int
    kv_blocks: int
    """KV blocks of a replica that fit beside weights and slots."""
    meets_slo: bool
    burst_rate: float
    """Requests a second that a replica serves if all arrive at once."""
    operating: Trial
    """The trial at the rate at which a replica's goodput is highest."""
    expected: Trial
    """The trial of the whole demand on that many replicas."""
    by_load: Sequence[Trial]
    by_seats: Sequence[Trial]
    by_slots: Sequence[Trial]
    """Empty without adapters."""

    @property
    def gpu_hours_per_million(self) -> float:
        """GPU-hours for a million output tokens, idle time included."""
        tokens = self.expected.offered_tokens_per_second
        return 1e6 / (3600 * tokens) if tokens else math.inf


Try = Callable[[Sequence[tuple[Demand, Setup]]], list[Trial]]
"""Runs trials, possibly in other processes; results are in the order of the trials."""


def attempt(demand: Demand, setup: Setup) -> Trial:
    """One trial. Raises ConfigError for what could not run."""
    num_parts = max(1, setup.num_replicas // setup.num_sampled)
    num_sampled = len(range(0, setup.num_replicas, num_parts))
    study = replace(
        demand.study,
        num_requests=demand.study.num_requests * setup.num_replicas,
        max_loras=setup.max_loras,
    )
    budget = max(demand.max_num_batched_tokens, setup.max_num_seqs)
    fleet = Fleet(
        study=study,
        policy=NamedPolicy(f"chunked_{budget}", "chunked", setup.max_num_seqs, budget),
        rate=setup.rate * setup.num_replicas,
        num_replicas=setup.num_replicas,
    )
    return Trial(setup, simulate_part(fleet, 0, num_parts), num_sampled)


def plan(demand: Demand, run: Try) -> Plan:
    """Raises ConfigError if the model does not fit, or nothing could be served at all."""
    slots = _possible_slots(demand.study)
    seats = _possible_seats(demand.study, slots[-1])
    sizing = Setup(num_replicas=1, max_num_seqs=seats[-1], max_loras=slots[-1], rate=1000.0)
    ceiling = run([(demand, sizing)])[0].figures
    if not ceiling.num_output_tokens:
        raise ConfigError("no request could be served: are they longer than max_model_len?")
    most = ceiling.num_requests / ceiling.seconds
    num_replicas = max(1, math.ceil(demand.rate / (SIZING_LOAD * most)))
    sizing = replace(sizing, num_replicas=num_replicas, rate=SIZING_LOAD * most)
    by_slots = _sweep(demand, [replace(sizing, max_loras=n) for n in slots], run)
    sizing = replace(sizing, max_loras=_smallest(by_slots, lambda s: s.max_loras))
    by_seats = _sweep(demand, [replace(sizing, max_num_seqs=n) for n in seats], run)
    sizing = replace(sizing, max_num_seqs=_smallest(by_seats, lambda s: s.max_num_seqs))
    by_load = run([(demand, replace(sizing, rate=load * most)) for load in LOADS])
    operating = operating_point(by_load, demand.share)
    expected = _confirm(demand, replace(operating.setup, num_sampled=NUM_CONFIRMED), run)
    return Plan(
        num_replicas=expected.setup.num_replicas,
        max_num_seqs=sizing.max_num_seqs,
        max_loras=sizing.max_loras,
        kv_blocks=replace(demand.study, max_loras=sizing.max_loras).kv_blocks,
        meets_slo=expected.figures.goodput >= demand.share,
        burst_rate=most,
        operating=operating,
        expected=expected,
        by_load=by_load,
        by_seats=by_seats,
        by_slots=by_slots if demand.study.popularity else (),
    )


def operating_point(trials: Sequence[Trial], share: float) -> Trial:
    """The most good requests a second among those that meet the share; else the largest share."""
    meeting = [trial for trial in trials if trial.figures.goodput >= share]
    if meeting:
        return max(meeting, key=lambda trial: trial.good_per_second)
    return max(trials, key=lambda trial: (trial.figures.goodput, -trial.setup.rate))


def _confirm(demand: Demand, setup: Setup, run: Try) -> Trial:
    num_replicas = max(1, math.ceil(demand.rate / setup.rate))
    trial = None
    for number in range(num_replicas, num_replicas + MAX_TRIES):
        setup = replace(setup, num_replicas=number, rate=demand.rate / number)
        trial = run([(demand, setup)])[0]
        if trial.figures.goodput >= demand.share:
            return trial
    assert trial is not None
    return trial


def _sweep(demand: Demand, setups: Sequence[Setup], run: Try) -> list[Trial]:
    return run([(demand, setup) for setup in setups])


def _smallest(trials: Sequence[Trial], value: Callable[[Setup], int]) -> int:
    """The smallest value that does about as well as the best one."""
    best = max(trial.figures.goodput for trial in trials)
    enough = [trial for trial in trials if trial.figures.goodput >= best - INDIFFERENT]
    if best == 0.0:  # too much for any of them: then throughput counts
        most = max(trial.tokens_per_second for trial in trials)
        enough = [trial for trial in trials if trial.tokens_per_second >= 0.99 * most]
    return min(value(trial.setup) for trial in enough)


def _possible_slots(study: Study) -> list[int]:
    if study.popularity is None:
        return [0]
    num_adapters = len(study.popularity.cumulative)
    limit = num_adapters
    if study.step_model is not None:
        limit = min(limit, study.step_model.max_loras)
    sizes = sorted({min(size, limit) for size in SLOTS})
    fitting = [size for size in sizes if _kv_room(replace(study, max_loras=size))]
    if not fitting:
        raise ConfigError(f"{study.model.name} and {sizes[0]} adapters do not fit into memory")
    return fitting


def _possible_seats(study: Study, max_loras: int) -> list[int]:
    if study.step_model is not None:
        return [seats for seats in SEATS if seats <= study.step_model.max_num_seqs] or [
            study.step_model.max_num_seqs
        ]
    room = replace(study, max_loras=max_loras).kv_blocks * study.block_size
    return [seats for seats in SEATS if seats == SEATS[0] or seats * 256 <= room]


def _kv_room(study: Study) -> bool:
    """Whether at least one sequence of the longest kind fits."""
    try:
        return study.kv_blocks * study.block_size >= study.max_model_len
    except ConfigError:
        return False
