"""The failure modes of continuous batching, each as a study that has it and one that is cured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.simulation.lengths import FixedLength, LognormalLength
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.popularity import uniform
from engine.simulation.roofline import A100
from engine.simulation.study import NamedPolicy, Row, Study
from engine.telemetry.alerts import FindingKind

SECONDS = 90
"""Duration of the arrivals, in seconds."""
CHUNKED = NamedPolicy("chunked_512", "chunked", 128, 512)
STUDY = Study(
    model=LLAMA_3_1_8B,
    gpu=A100,
    prompts=FixedLength(512),
    outputs=LognormalLength(mean=128, sigma=0.5, longest=512),
    num_kv_blocks=20_000,
    max_model_len=20_000,
)
LONG_PROMPTS = replace(
    STUDY,
    prompts=FixedLength(8000),
    outputs=LognormalLength(mean=200, sigma=0.5, longest=800),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    study: Study
    rate: float
    policy: NamedPolicy = CHUNKED


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMode:
    """What goes wrong, and what cures it. The alert that should find it has the same name."""

    kind: FindingKind
    made_by: str
    cured_by: str
    wrong: Case
    cured: Case


@dataclass(frozen=True, slots=True)
class Recognised:
    """Whether the alert is raised in the sick study, and none in the cured one."""

    mode: FailureMode
    is_named: bool
    is_silent: bool

    @property
    def holds(self) -> bool:
        """Whether both hold."""
        return self.is_named and self.is_silent


FAILURE_MODES = (
    FailureMode(
        kind="preemption_thrash",
        made_by="a KV pool for a third of what runs",
        cured_by="a larger pool",
        wrong=Case(replace(STUDY, num_kv_blocks=260, max_model_len=2000), 4.0),
        cured=Case(replace(STUDY, max_model_len=2000), 4.0),
    ),
    FailureMode(
        kind="decode_stall",
        made_by="prompts of 8,000 tokens in steps of their own",
        cured_by="chunks of 512",
        wrong=Case(LONG_PROMPTS, 1.0, NamedPolicy("prefill_first", "prefill_first", 128, 16_000)),
        cured=Case(LONG_PROMPTS, 1.0),
    ),
    FailureMode(
        kind="queueing_collapse",
        made_by="several times the rate that is served",
        cured_by="fewer requests a replica",
        wrong=Case(STUDY, 40.0),
        cured=Case(STUDY, 4.0),
    ),
    FailureMode(
        kind="runaway_generation",
        made_by="adapters that never draw their end token, cut at 400 tokens",
        cured_by="stop tokens",
        wrong=Case(
            replace(
                STUDY, popularity=uniform(2), max_loras=2, outputs=FixedLength(4000), max_tokens=400
            ),
            2.0,
        ),
        cured=Case(replace(STUDY, popularity=uniform(2), max_loras=2, max_tokens=400), 2.0),
    ),
    FailureMode(
        kind="adapter_churn",
        made_by="24 adapters in turn on 2 slots",
        cured_by="a slot for each",
        wrong=Case(replace(STUDY, popularity=uniform(24), max_loras=2, load_seconds=0.3), 6.0),
        cured=Case(replace(STUDY, popularity=uniform(24), max_loras=24, load_seconds=0.03), 6.0),
    ),
)


def jobs(seed: int = 1) -> list[tuple[Study, NamedPolicy, float, int]]:
    """Jobs for `run_jobs`: each mode, then its cure."""
    return [
        (
            replace(case.study, num_requests=round(case.rate * SECONDS)),
            replace(case.policy, name=name),
            case.rate,
            seed,
        )
        for mode in FAILURE_MODES
        for name, case in ((mode.kind, mode.wrong), (f"{mode.kind}, cured", mode.cured))
    ]


def recognise(rows: Sequence[Row]) -> list[Recognised]:
    """Judge the rows of `jobs`, which are in the same order."""
    found: list[Recognised] = []
    for mode, wrong, cured in zip(FAILURE_MODES, rows[::2], rows[1::2], strict=True):
        kinds = {sighting.finding.kind for sighting in wrong.sightings}
        found.append(Recognised(mode, mode.kind in kinds, not cured.sightings))
    return found
