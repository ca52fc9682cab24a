"""More adapters than slots, open loop: what swapping them costs the clients.

    python -m benchmarks.churn [--seconds S] [--fractions 0.5 0.75] [--json FILE]

First the saturation rate with 8 adapters on 8 slots, all resident. Then requests arrive as a
Poisson process at fractions of that rate, whatever became of those before: with the same 8
adapters, with 16 on the 8 slots, and with 64 whose popularity is Zipf's (exponent 1.0) on the 8
slots. Arrivals, prompts and lengths are the same in all three, but for a prompt's first token,
which no other prompt has: prefix caching is on, as it is unless told otherwise, so that a
preempted sequence finds its own prefix, and must find no other's.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from benchmarks.serving.figures import machine, markdown, percentile, write_json
from benchmarks.serving.load import (
    Call,
    Reply,
    Result,
    closed_loop,
    open_loop,
    read_workload,
    warm_up,
)
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import OurService, our_service
from benchmarks.serving.passes import gap_p99, ttft_p99
from benchmarks.serving.random_adapters import adapter_names, write_adapters

SLOTS = 8
FIRST_TOKEN, MOST_REQUESTS = 1000, 2000
"""First tokens of a run's prompts: from here, so many for each run."""


@dataclass(frozen=True, slots=True)
class Case:
    """How many adapters there are, and how skewed their popularity."""

    name: str
    adapters: int
    exponent: float
    """Of Zipf's law; 0: all alike."""


RESIDENT = Case("8 on 8 slots", 8, 0.0)
CASES = (RESIDENT, Case("16 on 8 slots", 16, 0.0), Case("64 (Zipf 1.0) on 8 slots", 64, 1.0))


def choose_adapters(case: Case, number: int, seed: int) -> list[str]:
    """An adapter's name for each of `number` requests."""
    weights = [1 / (rank + 1) ** case.exponent for rank in range(case.adapters)]
    return random.Random(seed).choices(adapter_names(case.adapters), weights, k=number)


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrivals before `seconds`."""
    source = random.Random(seed)
    gaps = (source.expovariate(rate) for _ in range(int(4 * rate * seconds) + 100))
    return [at for at in accumulate(gaps) if at < seconds]


def saturation_rate(replies: Sequence[Reply]) -> float:
    """Requests a second of a closed loop, from its 20th to its 80th percentile: neither while it
    fills up nor while it drains."""
    ends = sorted(reply.last for reply in replies)
    first, last = len(ends) // 5, len(ends) - 1 - len(ends) // 5
    return (last - first) / (ends[last] - ends[first])


def no_shared_prefixes(calls: Sequence[Call], first_token: int) -> list[Call]:
    """The calls with first tokens of their own: `first_token`, the next one, …"""
    return [
        replace(call, prompt=(first_token + index, *call.prompt[1:]))
        for index, call in enumerate(calls)
    ]


def run_case(
    service: OurService, case: Case, rate: float, seconds: float, *, seed: int, first_token: int
) -> Result:
    """Offer one case's requests at a rate; see `no_shared_prefixes`."""
    arrivals = poisson_arrivals(rate, seconds, seed)
    pool = read_workload("base")
    chosen = choose_adapters(case, len(arrivals), seed)
    taken = [replace(pool[index % len(pool)], model=name) for index, name in enumerate(chosen)]
    calls = no_shared_prefixes(taken, first_token)
    return asyncio.run(open_loop(service.url, calls, arrivals, service.key))


def cells(name: str, fraction: float, result: Result, resident: Result) -> list[str]:
    """One line of the table."""
    return [
        name,
        f"{fraction:.0%}",
        str(len(result.replies)),
        f"{percentile([reply.ttft for reply in result.replies], 0.5):.2f}",
        f"{ttft_p99(result):.2f}",
        f"{ttft_p99(result) / ttft_p99(resident):.2f}",
        f"{1e3 * gap_p99(result):.0f}",
        f"{gap_p99(result) / gap_p99(resident):.2f}",
    ]


COLUMNS = (
    "adapters", "load", "requests", "TTFT p50 s", "p99", "/ resident", "gap p99 ms", "/ resident",
)  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=90, help="of each of the runs")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--loops", type=int, default=2, help="of the run that saturates")
    options = parser.parse_args()
    started = time.monotonic()
    model = model_dir(options)
    print(machine(), flush=True)
    results: dict[tuple[float, Case], Result] = {}
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        names = adapter_names(max(case.adapters for case in CASES))
        folders = write_adapters(model, Path(folder), names)
        with our_service(model, ["--max-loras", str(SLOTS)], prefix_cache=True) as service:
            service.push(folders)
            warm_up(service.url, ["mix8"], key=service.key)
            calls = no_shared_prefixes(read_workload("mix8") * options.loops, first_token=0)
            full = asyncio.run(closed_loop(service.url, calls, 32, service.key))
            rate = saturation_rate(full.replies)
            print(f"saturated at {rate:.2f} requests/s", flush=True)
            for fraction in options.fractions:
                for case in CASES:
                    result = run_case(
                        service, case, fraction * rate, options.seconds, seed=1,
                        first_token=FIRST_TOKEN + len(results) * MOST_REQUESTS,
                    )  # fmt: skip
                    results[fraction, case] = result
                    print(
                        f"{case.name} at {fraction:.0%}: p99 {ttft_p99(result):.2f} s", flush=True
                    )
    rows = [
        cells(case.name, fraction, result, results[fraction, RESIDENT])
        for (fraction, case), result in results.items()
    ]
    print(f"\n{markdown(COLUMNS, rows)}\n\n{time.monotonic() - started:.0f} s; {machine()}")
    write_json(
        options.json,
        {
            "machine": machine(),
            "saturation_requests_per_second": rate,
            "runs": [
                {"adapters": case.name, "load": fraction, **result.as_dict()}
                for (fraction, case), result in results.items()
            ],
        },
    )


if __name__ == "__main__":
    main()
