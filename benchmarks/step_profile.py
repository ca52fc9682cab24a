"""Where the time of an engine step goes, beside the least that each part could take.

    python -m benchmarks.step_profile --model DIR [--repeats N] [--cpu-seconds] [--json FILE]

A real scheduler and a real runner in this process; three kinds of steps take turns: 32 sequences
that decode at a context of about 200 tokens on the base, the same with 8 adapters, and a prefill of
512 tokens with 4 adapters. Parts are medians over steps of their own time, so that they add up to
about the whole; the floor (`benchmarks/floor.py`) is measured between the steps.
`--cpu-seconds` counts one thread's own time: for machines that others use.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_lab import EngineLab, random_prompt, read_adapters
from benchmarks.floor import HEAD, FloorMeter, Load, ModelShapes, gemm_name
from benchmarks.part_clock import PartClock, Target
from benchmarks.serving.figures import machine, markdown, write_json
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from engine.core import EngineCore
from engine.models.decoder_config import read_decoder_config
from engine.runner.build_runner import BuiltRunner, build_runner
from engine.scheduling.scheduler import Scheduler

SEQUENCES = 32
PROMPT_TOKENS = 192
DECODE_STEPS = 16
CHUNK = 512
REST = "norms, rope, activations"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of step: prompts of `length` tokens, of which all but the last are prefilled before
    what is timed, or none."""

    name: str
    sequences: int
    length: int
    adapters: int
    decodes: bool

    def load(self) -> Load:
        """What one of its steps computes."""
        rows = self.sequences if self.decodes else self.sequences * self.length
        context = self.length + DECODE_STEPS // 2 if self.decodes else self.length
        # A prompt's queries see one key more each.
        scores = context if self.decodes else context * (context + 1) // 2
        return Load(
            rows=rows,
            logit_rows=self.sequences,
            context_tokens=self.sequences * context,
            scores=self.sequences * scores,
            adapters=self.adapters,
            adapter_rows=rows if self.adapters else 0,
        )


KINDS = (
    Kind("decode, base", SEQUENCES, PROMPT_TOKENS, 0, True),
    Kind("decode, 8 adapters", SEQUENCES, PROMPT_TOKENS, 8, True),
    Kind("prefill 512, 4 adapters", 4, CHUNK // 4, 4, False),
)


@dataclass(slots=True)
class Profile:
    """Milliseconds of one kind of step: a list over steps for each part, and over repeats for each
    floor."""

    steps: list[float] = field(default_factory=list[float])
    parts: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    floors: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    @property
    def step(self) -> float:
        """Median step."""
        return statistics.median(self.steps)

    def medians(self) -> tuple[dict[str, float], dict[str, float]]:
        """Parts and floors."""
        return median_of_each(self.parts), median_of_each(self.floors)


def median_of_each(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every key over the samples; a sample without it has 0."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}


def targets(built: BuiltRunner, vocab_size: int) -> list[Target]:
    """What is charged to which part; what none of them names is its caller's own time."""
    runner: Any = built.runner
    decoder = runner._decoder
    projection = decoder.layers[0].qkv

    def linear_part(linear: Any, *_: Any) -> str:
        if linear.out_features == vocab_size:
            return HEAD
        return gemm_name(linear.in_features, linear.out_features)

    linears = {type(projection._linear), type(decoder._lm_head._linear)}
    return [
        Target(EngineCore, "step", "step loop"),
        Target(Scheduler, "schedule", "schedule"),
        Target(Scheduler, "commit", "commit, outputs"),
        Target(Scheduler, "take_outputs", "commit, outputs"),
        Target(type(runner), "execute", "runner"),
        Target(_module_of(runner), "build_batch_inputs", "batch inputs"),
        Target(type(decoder), "forward", REST),
        *(Target(linear, "__call__", linear_part) for linear in linears),
        Target(_module_of(projection), "add_lora", "LoRA"),
        Target(type(runner._attention), "plan", "attention plan"),
        Target(type(runner._attention), "attend", "attention"),
        Target(type(runner._kv_cache), "write", "KV write"),
        Target(type(runner._sampler), "sample", "sample"),
    ]


def _module_of(instance: Any) -> Any:
    return sys.modules[type(instance).__module__]


class StepProfiler:
    """Runs kinds of steps on one engine."""

    def __init__(
        self,
        built: BuiltRunner,
        adapters: Mapping[str, Any],
        clock: Callable[[], int],
    ) -> None:
        self._lab = EngineLab(
            built, adapters, max_num_seqs=SEQUENCES, max_num_batched_tokens=CHUNK,
            max_loras=max(1, len(adapters)), enable_prefix_cache=True,
        )  # fmt: skip
        self._digests = list(adapters)
        self._clock = clock
        self._parts = PartClock(clock)
        self._targets = targets(built, built.vocab_size)
        self._vocab_size = built.vocab_size
        self._num_prefills = 0
        for digest in self._digests:  # into their slots, where they stay
            self._lab.add([1], 1, digest)
        self._lab.step_until(lambda: not self._lab.core.stats().running + self._num_waiting())

    def _num_waiting(self) -> int:
        return self._lab.core.stats().waiting

    def run(self, kind: Kind, profile: Profile) -> None:
        """Time some steps of a kind."""
        # A decode's prompts repeat and come from the prefix cache; a prefill's are new each time.
        self._num_prefills += not kind.decodes
        seed = 0 if kind.decodes else self._num_prefills
        for number in range(kind.sequences):
            adapter = self._digests[number % kind.adapters] if kind.adapters else None
            prompt = random_prompt(self._vocab_size, kind.length, seed, number)
            self._lab.add(prompt, DECODE_STEPS + 32, adapter)
        if kind.decodes:
            self._prefill_all(kind.sequences)
        with self._parts.watching(self._targets):
            for _ in range(DECODE_STEPS if kind.decodes else 1):
                start = self._clock()
                self._lab.step()
                profile.steps.append((self._clock() - start) / 1e6)
                profile.parts.append({k: v / 1e6 for k, v in self._parts.take().items()})
        self._lab.abort_all()

    def _prefill_all(self, sequences: int) -> None:
        decoding: set[int] = set()
        while len(decoding) < sequences:
            decoding.update(output.request_id for _, output in self._lab.step())


def measure(
    built: BuiltRunner, adapters: Mapping[str, Any], meter: FloorMeter, repeats: int,
    clock: Callable[[], int],
) -> dict[Kind, Profile]:  # fmt: skip
    """Profiles by kind; a first round is not counted."""
    profiler = StepProfiler(built, adapters, clock)
    profiles = {kind: Profile() for kind in KINDS}
    for number in range(repeats + 1):
        for kind, profile in profiles.items():
            scratch = profile if number else Profile()
            profiler.run(kind, scratch)
            scratch.floors.append(meter.milliseconds(kind.load()))
    return profiles


def table(profiles: Mapping[Kind, Profile]) -> str:
    """Parts as rows; for each kind of step its time and its floor, in milliseconds."""
    medians = {kind: profile.medians() for kind, profile in profiles.items()}
    names = dict.fromkeys(name for parts, _ in medians.values() for name in parts)
    widest = {name: max(parts.get(name, 0.0) for parts, _ in medians.values()) for name in names}
    columns = ["part, ms"]
    for kind in profiles:
        columns += [kind.name, "share", "floor"]
    rows: list[list[str]] = []
    for name in sorted(names, key=lambda name: -widest[name]):
        row = [name]
        for kind, (parts, floors) in medians.items():
            taken, floor = parts.get(name), floors.get(name)
            share = (taken or 0.0) / profiles[kind].step
            row += [_ms(taken), f"{share:.0%}" if taken else "", _ms(floor)]
        rows.append(row)
    whole = ["the step"]
    for kind, (_, floors) in medians.items():
        step, least = profiles[kind].step, sum(floors.values())
        whole += [_ms(step), f"{step / least:.2f} x", _ms(least)]
    return markdown(columns, [*rows, whole])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def as_dict(profiles: Mapping[Kind, Profile]) -> dict[str, Any]:
    """Medians, for JSON."""
    results: dict[str, Any] = {}
    for kind, profile in profiles.items():
        parts, floors = profile.medians()
        results[kind.name] = {"step_ms": profile.step, "parts_ms": parts, "floor_ms": floors}
    return results


def profile_model(
    model: Path, adapters_dir: Path, repeats: int, clock: Callable[[], int] = time.perf_counter_ns
) -> dict[Kind, Profile]:
    """Build an engine on a model and profile it, with adapters that lie in a folder."""
    names = adapter_names(max(kind.adapters for kind in KINDS))
    blocks = 2 * SEQUENCES * (-(-(PROMPT_TOKENS + 2 * DECODE_STEPS) // 16) + 1) + 4 * CHUNK // 16
    built = build_runner(model, num_kv_blocks=blocks, max_loras=len(names), self_test=False)
    adapters = read_adapters(built, [adapters_dir / name for name in names])
    meter = FloorMeter(ModelShapes.of(read_decoder_config(model)), clock)
    return measure(built, adapters, meter, repeats, clock)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-seconds", action="store_true", help="one thread's own time")
    options = parser.parse_args()
    clock = time.perf_counter_ns
    if options.cpu_seconds:
        torch.set_num_threads(1)
        clock = time.thread_time_ns
    model = model_dir(options)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        write_adapters(model, Path(folder), adapter_names(8))
        profiles = profile_model(model, Path(folder), options.repeats, clock)
    print(f"{machine()}; {torch.get_num_threads()} threads\n\n{table(profiles)}")
    write_json(options.json, {"machine": machine(), "profiles": as_dict(profiles)})


if __name__ == "__main__":
    main()
