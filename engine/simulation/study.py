"""Policies against arrival rates, over random seeds: each combination is one simulation."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from engine.config import Policy, SchedulerConfig
from engine.errors import ConfigError
from engine.simulation.arrivals import bursty, gamma
from engine.simulation.driver import Simulation
from engine.simulation.figures import AdapterWait, Figures, Slo, adapter_waits, figures
from engine.simulation.fitted import FittedStepTime, StepModel
from engine.simulation.intervals import ENDS_BY_ITSELF, AlertWatch, Sighting
from engine.simulation.lengths import CappedLength, Lengths
from engine.simulation.model_shape import ModelShape
from engine.simulation.popularity import Popularity
from engine.simulation.record import SimulatedRequest
from engine.simulation.rivals import Order
from engine.simulation.roofline import Gpu, RooflineStepTime
from engine.simulation.step_time import LoadTime
from engine.simulation.workload import Arrival, Traffic


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy and its token budget."""

    name: str
    policy: Policy
    max_num_seqs: int
    max_num_batched_tokens: int | None
    """None: whole batches of the longest prompts are prefilled in one step."""


STATIC_16 = NamedPolicy("static_16", "static", 16, None)
STATIC_64 = NamedPolicy("static_64", "static", 64, None)
PREFILL_FIRST = NamedPolicy("prefill_first", "prefill_first", 256, 8192)
CHUNKED_512 = NamedPolicy("chunked_512", "chunked", 256, 512)
POLICIES = (STATIC_16, STATIC_64, PREFILL_FIRST, CHUNKED_512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What all runs have in common. Units are seconds and tokens."""

    model: ModelShape
    gpu: Gpu
    prompts: Lengths
    outputs: Lengths
    max_tokens: int | None = None
    """The `max_tokens` of clients; None: each reply ends by itself at its drawn length."""
    num_requests: int = 1500
    max_model_len: int = 10_240
    num_kv_blocks: int | None = None
    """None: as many as 90% of the GPU's memory hold beside the weights."""
    block_size: int = 16
    variation: float | None = 1.0
    """Coefficient of variation of the gaps between arrivals, see `gamma`; None: bursts."""
    popularity: Popularity | None = None
    num_tenants: int = 1
    max_loras: int = 8
    max_cpu_loras: int | None = None
    """Adapters in host memory; None: four times as many as slots, and at least 32."""
    adapter_rank: int = 16
    load_seconds: float = 0.03
    step_model: StepModel | None = None
    """A measured engine, which replaces the roofline and the limits of a GPU's memory."""
    order: Order = "fair"
    trace: Sequence[Arrival] | None = None
    """Requests to replay, instead of all traffic described above; rates and seeds are ignored."""
    slo: Slo = field(default_factory=Slo)
    warm_up: float = 0.1

    @property
    def kv_blocks(self) -> int:
        """Of one replica. Raises ConfigError if there is no room for any."""
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        if self.step_model is not None:
            return self.step_model.num_kv_blocks
        room = 0.9 * self.gpu.memory - self.model.weight_bytes - self.lora_bytes
        num_blocks = int(room / (self.model.kv_bytes_per_token * self.block_size))
        if num_blocks < 1:
            raise ConfigError(f"{self.model.name} does not fit into the memory of {self.gpu.name}")
        return num_blocks

    @property
    def lora_bytes(self) -> int:
        """Bytes of device memory that all slots take."""
        return self.max_loras * self.model.adapter_bytes(self.adapter_rank)

    def step_time(self, policy: NamedPolicy) -> LoadTime:
        """Of one replica."""
        if self.step_model is not None:
            return FittedStepTime(self.step_model.costs)
        adapter_bytes = self.model.adapter_bytes(self.adapter_rank) if self.popularity else 0
        return RooflineStepTime(self.model, self.gpu, policy.policy == "static", adapter_bytes)

    def config(self, policy: NamedPolicy) -> SchedulerConfig:
        """Of one replica. Raises ConfigError for what could not run."""
        width = policy.max_num_seqs
        return SchedulerConfig(
            num_kv_blocks=self.kv_blocks,
            block_size=self.block_size,
            max_num_seqs=width,
            max_num_batched_tokens=policy.max_num_batched_tokens or width * self.max_model_len,
            max_model_len=self.max_model_len,
            max_loras=self.max_loras,
            max_queue_len=10**9,
            policy=policy.policy,
            enable_prefix_cache=False,  # simulated prompts share nothing
        )

    def replica(
        self, policy: NamedPolicy, on_finish: Callable[[SimulatedRequest], None] | None = None
    ) -> Simulation:
        """One engine, with nothing sent to it yet. Raises ConfigError for what could not run."""
        return Simulation(
            self.config(policy),
            step_time=self.step_time(policy),
            load_seconds=lambda _: self.load_seconds,
            max_cpu_loras=self.max_cpu_loras or max(32, 4 * self.max_loras),
            install_seconds=0.0 if self.step_model is None else self.step_model.install_seconds,
            on_finish=on_finish,
            quick=True,
            order=self.order,
        )

    def watch(self, replica: Simulation, begins: float, ends: float) -> AlertWatch:
        """What the service's alerts would say of a replica between these times."""
        return AlertWatch(
            replica,
            begins=begins,
            seconds=ends - begins,
            reply_limit=self.max_tokens or ENDS_BY_ITSELF,
        )

    def traffic(self, rate: float) -> Traffic:
        """The traffic at `rate` requests a second, unless a trace is replayed."""
        variation = self.variation
        return Traffic(
            arrivals=lambda random: (
                bursty(rate, random) if variation is None else gamma(rate, variation, random)
            ),
            prompts=self.prompts,
            outputs=CappedLength(self.outputs, cap) if (cap := self.max_tokens) else self.outputs,
            num_requests=self.num_requests,
            popularity=self.popularity,
            num_tenants=self.num_tenants,
        )

    def requests(self, rate: float, seed: int) -> Iterable[Arrival]:
        """The requests of the trace, or else those drawn with a seed."""
        return self.traffic(rate).requests(seed) if self.trace is None else self.trace


@dataclass(frozen=True, slots=True)
class Row:
    """One simulation."""

    policy: str
    max_num_seqs: int
    rate: float
    seed: int
    figures: Figures
    adapters: tuple[AdapterWait, ...] = ()
    """The adapters whose requests waited longest in all."""
    num_replicas: int = 1
    sightings: tuple[Sighting, ...] = ()
    """Alerts that the service would have raised."""

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        row = dataclasses.asdict(self)
        seen = [found["finding"] | {"replica": found["replica"]} for found in row.pop("sightings")]
        return row | row.pop("figures") | {"findings": seen}


Groups = dict[tuple[str, float], list[Row]]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    deviation: float
    """Standard deviation over the seeds; 0 for a single one."""


def simulate(study: Study, policy: NamedPolicy, rate: float, seed: int) -> Row:
    """One run. Raises ConfigError for what could not run."""
    simulation = study.replica(policy)
    arrivals = list(study.requests(rate, seed))
    for at, request in arrivals:
        simulation.send(at, request)
    times = [at for at, _ in arrivals[int(study.warm_up * len(arrivals)) :]] or [0.0]
    watch = study.watch(simulation, times[0], times[-1])  # afterwards it is but emptied
    watch.advance()
    service = 0.0 if study.step_model is None else study.step_model.service_seconds
    report = simulation.report()
    found = figures(report, study.slo, study.warm_up, service, study.kv_blocks)
    waits = adapter_waits(report, study.warm_up) if study.max_loras else ()
    sightings = tuple(map(Sighting, watch.findings()))
    return Row(policy.name, policy.max_num_seqs, rate, seed, found, waits, sightings=sightings)


def run(
    study: Study,
    policies: Iterable[NamedPolicy],
    rates: Iterable[float],
    seeds: Iterable[int],
    *,
    num_processes: int = 1,
) -> Iterator[Row]:
    """All combinations. Seeds vary slowest, so that each combination is done once early on."""
    jobs = [
        (study, policy, rate, seed)
        for seed, policy, rate in itertools.product(list(seeds), list(policies), list(rates))
    ]
    yield from run_jobs(jobs, num_processes=num_processes)


def run_jobs(
    jobs: Sequence[tuple[Study, NamedPolicy, float, int]], *, num_processes: int = 1
) -> Iterator[Row]:
    """Arguments of `simulate`; rows in the order of the jobs."""
    if num_processes == 1:
        yield from (simulate(*job) for job in jobs)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(simulate, *zip(*jobs, strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def spread(rows: Iterable[Row], value: Callable[[Row], float]) -> Spread:
    """Mean and spread over these rows, of which there is at least one."""
    values = [value(row) for row in rows]
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


def grouped(rows: Sequence[Row]) -> Groups:
    """Rows by policy and rate, in the order in which those first occur."""
    groups: Groups = {}
    for row in rows:
        groups.setdefault((row.policy, row.rate), []).append(row)
    return groups
