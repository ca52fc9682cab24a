"""What a long prompt does to the sequences that are decoding when it arrives.

    python -m benchmarks.chunked_prefill [--repeats N] [--json FILE]

16 sequences decode; a prompt of 2,000 tokens arrives. For each token budget of a step: the 99th
percentile of the gaps between the running sequences' tokens until the prompt is prefilled, and that
gap divided by one mixed step of that budget. The latter is measured on its own, by computing the
batches of another such arrival several times over: the dearest batch's median. `prefill_first` is
given a budget in which the whole prompt fits.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.engine_lab import EngineLab, random_prompt
from benchmarks.serving.figures import machine, markdown, percentile, write_json
from benchmarks.serving.options import make_parser, model_dir
from engine.config import Policy
from engine.runner.build_runner import BuiltRunner, build_runner
from engine.scheduled_batch import ScheduledBatch, StepResult

DECODING = 16
CONTEXT_TOKENS = 32
PROMPT_TOKENS = 2000
BUDGETS = (128, 256, 512)


class ReplayingRunner:
    """A runner that can compute each batch several times over, to time it without the scheduler.

    A batch that is computed again writes the same keys and values to the same places.
    """

    def __init__(self, built: BuiltRunner) -> None:
        self._runner = built.runner
        self.install_adapter = built.runner.install_adapter
        self.clear_slot = built.runner.clear_slot
        self.replays = 1
        self.seconds: list[float] = []
        """Of the batches since it was emptied: the median over the replays."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        taken: list[float] = []
        results: list[StepResult] = []
        for _ in range(self.replays):
            start = time.perf_counter()
            results.append(self._runner.execute(batch))
            taken.append(time.perf_counter() - start)
        self.seconds.append(statistics.median(taken))
        return results[-1]


@dataclass(slots=True)
class Arrivals:
    """What several arrivals under one policy and budget did; seconds."""

    name: str
    gaps: list[float] = field(default_factory=list[float])
    ttfts: list[float] = field(default_factory=list[float])
    mixed_steps: list[float] = field(default_factory=list[float])
    """Of each arrival that was replayed, the dearest batch."""

    @property
    def gap_p99(self) -> float:
        return percentile(self.gaps, 0.99)

    @property
    def mixed_step(self) -> float:
        return statistics.median(self.mixed_steps)


class ArrivalLab:
    """An engine with sequences that decode for ever."""

    def __init__(self, built: BuiltRunner, name: str, policy: Policy, budget: int) -> None:
        self.arrivals = Arrivals(name)
        self._vocab_size = built.vocab_size
        self._runner = ReplayingRunner(built)
        self._built = built
        self._policy: Policy = policy
        self._budget = budget

    def run(self, seed: int, *, replays: int) -> None:
        """One arrival: `replays` is 1 to measure gaps, more to measure a mixed step."""
        runner = self._runner
        lab = EngineLab(
            self._built, {}, runner=runner, policy=self._policy, max_num_seqs=DECODING + 1,
            max_num_batched_tokens=self._budget, max_loras=0, enable_prefix_cache=False,
        )  # fmt: skip
        runner.replays = 1
        running: set[int] = set()
        for number in range(DECODING):
            lab.add(random_prompt(self._vocab_size, CONTEXT_TOKENS, seed, number), 400)
        while len(running) < DECODING:
            running.update(output.request_id for _, output in lab.step())
        lab.step()
        last_token = dict.fromkeys(running, time.perf_counter())
        runner.replays, runner.seconds = replays, []
        arrived = time.perf_counter()
        newcomer = lab.add(random_prompt(self._vocab_size, PROMPT_TOKENS, seed, -1), 8)
        ttft: float | None = None
        gaps: list[float] = []
        while ttft is None or len(gaps) < DECODING:
            outputs = lab.step()
            now = time.perf_counter()
            for _, output in outputs:
                if output.request_id == newcomer:
                    ttft = ttft or now - arrived
                else:
                    gaps.append(now - last_token[output.request_id])
                    last_token[output.request_id] = now
        lab.abort_all()
        if replays == 1:
            self.arrivals.gaps += gaps
            self.arrivals.ttfts.append(ttft)
        else:
            self.arrivals.mixed_steps.append(max(runner.seconds))


def cells(arrivals: Arrivals, has_mixed_steps: bool) -> list[str]:
    """One line of the table."""
    step = f"{1e3 * arrivals.mixed_step:.0f}" if has_mixed_steps else ""
    ratio = f"{arrivals.gap_p99 / arrivals.mixed_step:.2f}" if has_mixed_steps else ""
    return [
        arrivals.name,
        f"{1e3 * percentile(arrivals.gaps, 0.5):.0f}",
        f"{1e3 * arrivals.gap_p99:.0f}",
        step,
        ratio,
        f"{statistics.median(arrivals.ttfts):.2f}",
    ]


def measure(built: BuiltRunner, budgets: Sequence[int], repeats: int) -> list[Arrivals]:
    """Budgets take turns; the first arrival of each is not counted. The last is prefill_first."""
    labs = [ArrivalLab(built, f"chunked, {budget}", "chunked", budget) for budget in budgets]
    whole = ArrivalLab(built, "prefill_first", "prefill_first", PROMPT_TOKENS + DECODING)
    for number in range(repeats + 1):
        for lab in (*labs, whole):
            lab.run(2 * number, replays=1)
            if lab is not whole:
                lab.run(2 * number + 1, replays=3)
            if not number:
                lab.arrivals = Arrivals(lab.arrivals.name)
    return [lab.arrivals for lab in (*labs, whole)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    blocks = DECODING * 32 + PROMPT_TOKENS // 16 + 16
    built = build_runner(
        model_dir(options), num_kv_blocks=blocks, max_loras=0, self_test=False, max_model_len=4096
    )
    print(machine(), flush=True)
    *chunked, whole = measure(built, BUDGETS, options.repeats)
    columns = (
        "policy, tokens a step",
        "gap p50 ms",
        "p99",
        "mixed step ms",
        "p99 / step",
        "TTFT s",
    )
    rows = [*(cells(arrivals, True) for arrivals in chunked), cells(whole, False)]
    print(f"\n{markdown(columns, rows)}\n")
    middle = chunked[BUDGETS.index(256)]
    print(f"prefill_first's p99 / that of chunks of 256: {whole.gap_p99 / middle.gap_p99:.1f}")
    write_json(
        options.json,
        {
            "machine": machine(),
            "over_mixed_step": {a.name: a.gap_p99 / a.mixed_step for a in chunked},
            "gap_p99_s": {a.name: a.gap_p99 for a in (*chunked, whole)},
        },
    )


if __name__ == "__main__":
    main()
