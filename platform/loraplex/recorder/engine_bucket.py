"""What the engine did and looked like in one stretch of time."""

from dataclasses import dataclass, field

from engine.engine_stats import EngineStats
from engine.telemetry.records import StepRecord
from loraplex.recorder.sketch import Sketch, merge_packed, pack_all

PARTS = ("schedule", "prepare", "forward", "lora", "sample", "post")
ENGINE_SUMS = (
    "covered", "down", "missed", "samples", "running", "waiting", "kv_share", "slots_used",
    "steps", "rows", "adapters", "prefill_tokens", "decode_tokens", "base_tokens", "preemptions",
    *PARTS,
)  # fmt: skip


@dataclass(slots=True)
class EngineBucket:
    """Sums of a stretch; of gauges, the sum over `samples`."""

    covered: float = 0.0
    """Seconds of it that the engine's records tell of."""
    down: float = 0.0
    """Seconds of it without an engine."""
    missed: int = 0
    """Records that were overwritten before they were read."""
    samples: int = 0
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    slots_used: int = 0
    steps: int = 0
    rows: int = 0
    adapters: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    base_tokens: int = 0
    preemptions: int = 0
    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    lora: float = 0.0
    sample: float = 0.0
    post: float = 0.0
    sketches: dict[str, Sketch] = field(default_factory=dict[str, Sketch])
    """`step`: seconds of steps."""

    def add_step(self, step: StepRecord) -> None:
        """Count a step."""
        self.steps += 1
        self.adapters += step.adapters
        self.preemptions += step.preemptions
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(step.seconds, part))
        for share in step.shares:
            self.rows += share.prefill_rows + share.decode_rows
            self.prefill_tokens += share.prefill_tokens
            self.decode_tokens += share.decode_rows
            if share.tenant and share.label is None:
                self.base_tokens += share.prefill_tokens + share.decode_rows
        self.sketches.setdefault("step", Sketch()).add(step.seconds.total)

    def add_sample(self, stats: EngineStats) -> None:
        """Count a look at the engine."""
        self.samples += 1
        self.running += stats.running
        self.waiting += stats.waiting
        self.kv_share += stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
        self.slots_used += stats.slots_used

    def merge(self, other: "EngineBucket") -> None:
        """Count all that the other has counted."""
        for name in ENGINE_SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, sketch in other.sketches.items():
            self.sketches.setdefault(name, Sketch()).merge(sketch)

    def merge_packed(self, sketches: bytes) -> None:
        """Take in distributions as a row holds them."""
        merge_packed(self.sketches, sketches)

    def pack_sketches(self) -> bytes:
        """Its distributions, for a row."""
        return pack_all(self.sketches)

    def mean(self, gauge: str) -> float | None:
        """A gauge's mean; None where nobody looked."""
        return getattr(self, gauge) / self.samples if self.samples else None

    def step_quantiles(self) -> list[float | None]:
        """p50, p95 and p99 of a step's seconds."""
        return self.sketches.get("step", Sketch()).quantiles(0.5, 0.95, 0.99)
