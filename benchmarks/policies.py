"""Request-level batches against continuous batching, on one engine and the same kernels.

    python -m benchmarks.policies [--requests N] [--quick] [--json FILE]

Prompts of 128 tokens, outputs lognormal (mean 128, sigma 0.8, cut to 8 to 1,024), all of them
waiting from the start. `static` fills a batch, pads its prompts to the longest and computes every
row until the last has finished; `continuous` has 32 seats and is timed from when they are full
until nothing waits. The slot efficiency is output tokens divided by rows that sampled; the
formula's is E[output] / E[longest of a batch].
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist

from benchmarks.engine_lab import EngineLab, num_new_tokens, random_prompt
from benchmarks.serving.figures import machine, markdown, write_json
from benchmarks.serving.options import make_parser, model_dir
from engine.runner.build_runner import BuiltRunner, build_runner
from engine.scheduled_batch import ScheduledBatch, StepResult

PROMPT_TOKENS = 128
MEAN, SIGMA, SHORTEST, LONGEST = 128, 0.8, 8, 1024
SEATS = 32
WIDTHS = (16, 32)


def output_length(quantile: float) -> int:
    """The output distribution's inverse; quantiles are above 0 and below 1."""
    # exp(mu + sigma^2 / 2) is a lognormal's mean.
    log_length = NormalDist(_mu(), SIGMA).inv_cdf(quantile)
    return round(min(max(exp(log_length), SHORTEST), LONGEST))


def output_lengths(number: int, seed: int = 0) -> list[int]:
    """Lengths at evenly spaced quantiles, shuffled: the distribution itself, for any number."""
    lengths = [output_length((index + 0.5) / number) for index in range(number)]
    random.Random(seed).shuffle(lengths)
    return lengths


def expected_longest(width: int) -> float:
    """E[the longest of `width` outputs]: the sum over n of P(longest > n)."""
    normal = NormalDist(_mu(), SIGMA)
    tail = (1 - normal.cdf(log(length + 0.5)) ** width for length in range(SHORTEST, LONGEST))
    return SHORTEST + sum(tail)


def slot_efficiency(width: int) -> float:
    """E[output] / E[longest of a batch], of request-level batches."""
    return expected_longest(1) / expected_longest(width)


def _mu() -> float:
    return log(MEAN) - SIGMA**2 / 2


class CountingRunner:
    """A runner that counts the rows which sample: each is a seat's work for one token."""

    def __init__(self, built: BuiltRunner) -> None:
        self._runner = built.runner
        self.install_adapter = built.runner.install_adapter
        self.clear_slot = built.runner.clear_slot
        self.sampling_rows = 0

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.sampling_rows += sum(row.sampling is not None for row in batch.rows)
        return self._runner.execute(batch)


@dataclass(slots=True)
class Run:
    """What a policy did in the timed span."""

    name: str
    formula: float
    tokens: int = 0
    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def efficiency(self) -> float:
        return self.tokens / self.rows

    def cells(self) -> list[str]:
        return [
            self.name,
            f"{self.tokens / self.seconds:.0f}",
            f"{self.tokens / self.cpu_seconds:.0f}",
            f"{self.tokens / self.steps:.1f}",
            f"{self.efficiency:.2f}",
            f"{self.formula:.2f}",
        ]


def run_policy(
    built: BuiltRunner, prompts: Sequence[Sequence[int]], lengths: Sequence[int], width: int,
    *, static: bool,
) -> Run:  # fmt: skip
    """Serve all requests; `static` batches are whole ones, so their number must divide theirs."""
    runner = CountingRunner(built)
    lab = EngineLab(
        built, {}, runner=runner, policy="static" if static else "chunked", max_num_seqs=width,
        max_loras=0, enable_prefix_cache=False,
    )  # fmt: skip
    for prompt, length in zip(prompts, lengths, strict=True):
        lab.add(prompt, length)
    if static:
        run = Run(f"static, {width} wide", slot_efficiency(width))
    else:
        run = Run(f"continuous, {width} seats", 1.0)
        lab.step_until(lambda: lab.core.stats().waiting <= len(prompts) - width)
        runner.sampling_rows = 0
    wall, cpu = time.perf_counter(), time.process_time()
    while True:
        stats = lab.core.stats()
        if not (stats.running + stats.waiting if static else stats.waiting):
            break
        run.tokens += num_new_tokens(lab.step())
        run.steps += 1
    run.seconds, run.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    run.rows = runner.sampling_rows
    lab.abort_all()
    return run


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--quick", action="store_true", help="64 requests")
    options = parser.parse_args()
    number = 64 if options.quick else options.requests
    if number % SEATS or number <= SEATS:
        parser.error(f"--requests must be a multiple of {SEATS}, and more than that")
    blocks = SEATS * (-(-(PROMPT_TOKENS + LONGEST) // 16) + 1)
    built = build_runner(
        model_dir(options), num_kv_blocks=blocks, max_loras=0, self_test=False, max_model_len=2048
    )
    lengths = output_lengths(number)
    prompts = [random_prompt(built.vocab_size, PROMPT_TOKENS, index) for index in range(number)]
    print(f"{machine()}; {number} requests", flush=True)
    warm = run_policy(built, prompts[:SEATS] * 2, [8] * 2 * SEATS, SEATS, static=False)
    print(f"warm-up: {warm.tokens} tokens in {warm.seconds:.1f} s", flush=True)
    continuous = run_policy(built, prompts, lengths, SEATS, static=False)
    runs = [continuous]
    for width in WIDTHS:
        runs.append(run_policy(built, prompts, lengths, width, static=True))
    columns = ("policy", "tokens/s", "tokens/CPU s", "tokens a step", "efficiency", "formula")
    print(f"\n{markdown(columns, [run.cells() for run in runs])}\n")
    wall = min(continuous.tokens / continuous.seconds / (r.tokens / r.seconds) for r in runs[1:])
    cpu = min(
        continuous.tokens / continuous.cpu_seconds / (r.tokens / r.cpu_seconds) for r in runs[1:]
    )
    print(f"continuous / better static: {wall:.2f} by the clock, {cpu:.2f} by CPU time")
    write_json(
        options.json,
        {
            "machine": machine(),
            "requests": number,
            "ratio": wall,
            "cpu_ratio": cpu,
            "runs": {
                run.name: {
                    "tokens_per_second": run.tokens / run.seconds,
                    "tokens_per_cpu_second": run.tokens / run.cpu_seconds,
                    "efficiency": run.efficiency,
                    "formula": run.formula,
                }
                for run in runs
            },
        },
    )


if __name__ == "__main__":
    main()
