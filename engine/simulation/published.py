"""Two articles' figures of continuous batching, and the same out of our own scheduler.

An 8B model in bfloat16 on an H100, prompts of 1,000 and outputs of 250 tokens on average; an
article's simulation of 1,500 requests, recomputed by an independent one. A target is the range of
the two. Single runs differ much, so ours are means over random seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from engine.simulation.capacity import decode_line, gpu_time, little_batch, slot_efficiency
from engine.simulation.figures import Figures
from engine.simulation.lengths import LognormalLength, mean_longest
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.roofline import H100, RooflineStepTime
from engine.simulation.study import (
    CHUNKED_512,
    PREFILL_FIRST,
    STATIC_16,
    STATIC_64,
    NamedPolicy,
    Row,
    Spread,
    Study,
    spread,
)

PROMPTS = LognormalLength(mean=1000, sigma=0.8, shortest=32, longest=8192)
OUTPUTS = LognormalLength(mean=250, sigma=0.8, shortest=8, longest=2048)
SATURATED = 30.0
"""Requests a second; more than any policy sustains."""
STUDY = Study(
    model=LLAMA_3_1_8B,
    gpu=H100,
    prompts=PROMPTS,
    outputs=OUTPUTS,
    num_requests=1500,
    max_model_len=8192 + 2048 + 1,
    num_kv_blocks=256 * 41,  # the article's cache never runs out
    block_size=256,
    max_loras=0,
)
RUNS: tuple[tuple[NamedPolicy, float], ...] = (
    (STATIC_16, SATURATED),
    (STATIC_64, SATURATED),
    (PREFILL_FIRST, 16.0),
    (PREFILL_FIRST, 20.0),
    (PREFILL_FIRST, SATURATED),
    (CHUNKED_512, 16.0),
    (CHUNKED_512, 20.0),
    (CHUNKED_512, SATURATED),
)
"""Policies and rates that the figures need."""
CURVES = tuple(
    (policy, rate)
    for policy in (STATIC_16, STATIC_64, PREFILL_FIRST, CHUNKED_512)
    for rate in (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0)
    if (policy, rate) not in RUNS
)
CONTEXT = 1125
BATCH = 256
SAMPLE = 20_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """One published figure and ours."""

    quantity: str
    lowest: float
    highest: float
    """What was published; two equal numbers where both agree."""
    tolerance: float
    """Relative tolerance, on either side."""
    ours: Spread

    @property
    def holds(self) -> bool:
        """Whether our mean lies within the tolerance."""
        low, high = self.lowest * (1 - self.tolerance), self.highest * (1 + self.tolerance)
        return low <= self.ours.mean <= high


def jobs(
    num_seeds: int, *, with_curves: bool = False
) -> list[tuple[Study, NamedPolicy, float, int]]:
    """What `run_jobs` is to run; `with_curves`: the lower rates too, as the article's Figure 3."""
    runs = [*RUNS, *CURVES] if with_curves else RUNS
    return [(STUDY, policy, rate, seed) for seed in range(num_seeds) for policy, rate in runs]


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """All published figures, from the rows of `jobs`."""
    return [*_of_formulas(), *_of_runs(rows)]


def _of_formulas() -> list[Comparison]:
    step_time, random = RooflineStepTime(LLAMA_3_1_8B, H100), Random(0)  # noqa: S311
    prompts = [PROMPTS.draw(random) for _ in range(SAMPLE)]
    outputs = [OUTPUTS.draw(random) for _ in range(SAMPLE)]
    mean_output = sum(outputs) / SAMPLE
    found: list[Comparison] = []
    for width, low, high, efficiency in ((4, 481, 483, 0.51), (16, 809, 812, 0.31), (64, 1210, 1219, 0.20)):  # fmt: skip  # noqa: E501
        longest = mean_longest(OUTPUTS, width, random)
        found.append(_exact(f"longest output, B = {width}", low, high, longest))
        ours = slot_efficiency(mean_output, longest)
        found.append(_exact(f"slot efficiency, B = {width}", efficiency, efficiency, ours))
    for batch, low, high in ((1, 153, 153), (64, 6390, 6400), (256, 12440, 12450)):
        rate = batch / step_time.decode_seconds(batch, CONTEXT)
        found.append(_exact(f"decode tokens/s, batch {batch}", low, high, rate))
    ceiling = gpu_time(step_time, prompts, outputs, batch=BATCH, context=CONTEXT)
    line = decode_line(step_time, CONTEXT)
    return [
        *found,
        _exact("GPU time a request, ms", 48.2, 48.2, ceiling.seconds * 1e3),
        _exact("ceiling, requests/s", 20.8, 20.8, ceiling.requests_per_second),
        _exact("ceiling, output tokens/s", 5140, 5140, ceiling.output_tokens_per_second),
        _exact("batch at 10 requests/s", 18, 18, little_batch(10, mean_output, line)),
    ]


def _of_runs(rows: Sequence[Row]) -> list[Comparison]:
    def over(policy: NamedPolicy, rate: float, field: str) -> Spread:
        chosen = [row for row in rows if (row.policy, row.rate) == (policy.name, rate)]
        return spread(chosen, partial(_value, field))

    tokens = "output_tokens_per_second"
    static = [over(policy, SATURATED, tokens) for policy in (STATIC_16, STATIC_64)]
    continuous = over(PREFILL_FIRST, SATURATED, tokens)
    ratio = 2 * continuous.mean / (static[0].mean + static[1].mean)
    return [
        Comparison("static_16, saturated tokens/s", 400, 423, 0.05, static[0]),
        Comparison("static_64, saturated tokens/s", 400, 423, 0.05, static[1]),
        Comparison("prefill_first, saturated tokens/s", 4350, 4350, 0.05, continuous),
        Comparison("capacity, prefill_first : static", 10.3, 10.8, 0.05, Spread(ratio, 0.0)),
        Comparison("p99 gap at 16/s, ms", 192, 196, 0.10, over(PREFILL_FIRST, 16, "gap_p99_ms")),
        Comparison("p99 gap at 20/s, ms", 294, 327, 0.10, over(PREFILL_FIRST, 20, "gap_p99_ms")),
        Comparison("TPOT p50 at 16/s, ms", 20, 20.6, 0.05, over(PREFILL_FIRST, 16, "tpot_p50_ms")),
        Comparison("TPOT p50 at 20/s, ms", 36, 38, 0.05, over(PREFILL_FIRST, 20, "tpot_p50_ms")),
    ]


def _value(field: str, row: Row) -> float:
    assert field in Figures.__dataclass_fields__
    return float(getattr(row.figures, field))


def _exact(quantity: str, lowest: float, highest: float, ours: float) -> Comparison:
    return Comparison(quantity, lowest, highest, 0.05, Spread(ours, 0.0))
