"""A prompt of 4,000 tokens beside a stream, in chunks of equal tokens or of equal work.

    python -m benchmarks.long_contexts [--tokens N] [--repeats N] [--cpu-seconds] [--json FILE]

One sequence decodes when a prompt of `--tokens` arrives, whose eight choices are penalised and
report log-probabilities. A step has the service's budget, of which a token of a prefill costs one,
or by its context (`engine/scheduling/step_work.py`); the two take turns, and must draw the same
tokens.
`--cpu-seconds` runs one thread and counts its own time: for machines that others use.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.engine_lab import CLIENT, EngineLab, random_prompt
from benchmarks.serving.figures import machine, markdown, percentile, write_json
from benchmarks.serving.options import make_parser, model_dir
from engine.messages import EngineRequest
from engine.process import DEFAULT_MAX_NUM_BATCHED_TOKENS
from engine.runner.build_runner import BuiltRunner, build_runner
from engine.sampling_params import SamplingParams

NEWCOMER = 1 << 20
CHOICES = 8
OUTPUT_TOKENS = 12


@dataclass(slots=True)
class Figures:
    """Seconds over all arrivals of one kind."""

    name: str
    gaps: list[float] = field(default_factory=list[float])
    """Of the stream, until the newcomer's first token."""
    decodes: list[float] = field(default_factory=list[float])
    """Of the stream, afterwards."""
    ttfts: list[float] = field(default_factory=list[float])


def arrive(
    built: BuiltRunner,
    figures: Figures,
    clock: Callable[[], float],
    *,
    attention_context: int | None,
    num_tokens: int,
    seed: int,
) -> list[tuple[int, ...]]:
    """One arrival; returns the newcomer's tokens as they came."""
    lab = EngineLab(
        built, {}, clock=time.monotonic, max_loras=0, enable_prefix_cache=False,
        max_num_batched_tokens=DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"],
        attention_context=attention_context,
    )  # fmt: skip
    lab.add(random_prompt(built.vocab_size, 32, seed, 0), 1000)
    for _ in range(4):
        lab.step()
    sampling = SamplingParams(
        max_tokens=OUTPUT_TOKENS, seed=seed, temperature=1.0, ignore_eos=True, n=CHOICES,
        frequency_penalty=0.5, presence_penalty=0.5, logprobs=5,
    )  # fmt: skip
    prompt = random_prompt(built.vocab_size, num_tokens, seed, 1)
    lab.core.add(
        CLIENT,
        EngineRequest(
            request_id=NEWCOMER, tenant="newcomer", prompt_token_ids=prompt, sampling=sampling
        ),
    )
    drawn: list[tuple[int, ...]] = []
    seconds: list[float] = []
    is_over = False
    while not is_over:
        began = clock()
        outputs = [out for _, out in lab.step() if out.request_id == NEWCOMER]
        taken = clock() - began
        (figures.decodes if drawn else seconds).append(taken)
        drawn += [tuple(delta.token_ids) for output in outputs for delta in output.deltas]
        is_over = any(output.finished for output in outputs)
    figures.gaps += seconds
    figures.ttfts.append(sum(seconds))
    lab.abort_all()
    return drawn


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-seconds", action="store_true")
    options = parser.parse_args()
    built = build_runner(
        model_dir(options),
        num_kv_blocks=options.tokens // 16 + CHOICES * 4 + 80,
        max_loras=0,
        self_test=False,
        threads=1 if options.cpu_seconds else None,
    )
    clock = time.thread_time if options.cpu_seconds else time.perf_counter
    print(f"{machine()}; {torch.get_num_threads()} threads", flush=True)
    one_each = Figures("one each")
    by_context = Figures(f"by context, K = {built.attention_context}")
    kinds = ((None, one_each), (built.attention_context, by_context))
    for number in range(options.repeats + 1):
        drawn = [
            arrive(
                built,
                figures if number else Figures("warm-up"),
                clock,
                attention_context=context,
                num_tokens=options.tokens,
                seed=number,
            )
            for context, figures in kinds
        ]
        assert all(tokens == drawn[0] for tokens in drawn), "another token was drawn"
    rows = [
        [
            kind.name,
            f"{1e3 * percentile(kind.gaps, 0.5):.0f}",
            f"{1e3 * max(kind.gaps):.0f}",
            f"{len(kind.gaps) // options.repeats}",
            f"{statistics.median(kind.ttfts):.2f}",
            f"{1e3 * percentile(kind.decodes, 0.5):.0f}",
        ]
        for _, kind in kinds
    ]
    columns = ("prefill tokens cost", "gap p50 ms", "max", "steps", "TTFT s", "gap after it p50 ms")
    print(f"\n{markdown(columns, rows)}\n")
    ratio = max(by_context.gaps) / max(one_each.gaps)
    print(f"longest gap: {ratio:.2f} of what it was")
    write_json(
        options.json,
        {
            "machine": machine(),
            "longest_gap_ratio": ratio,
            "gaps_s": {kind.name: kind.gaps for _, kind in kinds},
            "ttfts_s": {kind.name: kind.ttfts for _, kind in kinds},
        },
    )


if __name__ == "__main__":
    main()
