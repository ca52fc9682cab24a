"""Several systems under the same load, taking turns, so that what the machine does hits all."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving.figures import over_passes, percentile
from benchmarks.serving.load import Result, run_mix
from benchmarks.serving.ours import OurService, Usage

COLUMNS = (
    "system, traffic", "tokens/s", "TTFT mean s", "p50", "p99", "ms a token", "p99", "gap p99 ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contender:
    """A system that runs, and the traffic that it gets."""

    name: str
    url: str
    mix: str
    key: str = ""
    base: str = "base"
    usage: Callable[[], Usage] | None = None


@dataclass(slots=True)
class Passes:
    """What one contender did, pass by pass."""

    results: list[Result] = field(default_factory=list[Result])
    usages: list[Usage] = field(default_factory=list[Usage])

    def over(self, figure: Callable[[Result], float], digits: int = 0) -> str:
        """A figure's median and extremes."""
        return over_passes([figure(result) for result in self.results], digits)

    def as_dict(self) -> dict[str, Any]:
        """Every pass, for JSON."""
        return {
            "passes": [result.as_dict() for result in self.results],
            "usage": [usage.as_dict() for usage in self.usages],
        }


def take_turns(
    contenders: Sequence[Contender], *, passes: int, loops: int, seconds: float,
    report: Callable[[str], None] = print,
) -> dict[str, Passes]:  # fmt: skip
    """Run every contender once a pass; no pass begins that would end after `seconds`."""
    taken = {contender.name: Passes() for contender in contenders}
    started = time.monotonic()
    for number in range(passes):
        pass_started = time.monotonic()
        for contender in contenders:
            before = contender.usage() if contender.usage else None
            result = run_mix(
                contender.url, contender.mix, key=contender.key, loops=loops, base=contender.base
            )
            if contender.usage and before:
                taken[contender.name].usages.append(contender.usage() - before)
            taken[contender.name].results.append(result)
            report(
                f"pass {number + 1}, {contender.name}: {result.tokens_per_second:.0f} tokens/s "
                f"in {result.seconds:.0f} s"
            )
        now = time.monotonic()
        if number + 1 < passes and now - started + (now - pass_started) > seconds:
            report(f"no time for more than {number + 1} of {passes} passes")
            break
    return taken


def row(name: str, passes: Passes) -> list[str]:
    """One line of the table with `COLUMNS`."""
    return [
        name,
        passes.over(lambda result: result.tokens_per_second),
        passes.over(lambda result: statistics.mean(reply.ttft for reply in result.replies), 2),
        passes.over(lambda result: percentile([reply.ttft for reply in result.replies], 0.5), 2),
        passes.over(ttft_p99, 2),
        passes.over(lambda r: 1e3 * statistics.mean(reply.tpot for reply in r.replies)),
        passes.over(lambda r: 1e3 * percentile([reply.tpot for reply in r.replies], 0.99)),
        passes.over(lambda result: 1e3 * gap_p99(result)),
    ]


def ratio(
    taken: Mapping[str, Passes], over: str, under: str, figure: Callable[[Result], float]
) -> list[float]:
    """A figure of one contender divided by another's, pass by pass."""
    pairs = zip(taken[over].results, taken[under].results, strict=True)
    return [figure(a) / figure(b) for a, b in pairs]


def throughput(result: Result) -> float:
    """Output tokens a second."""
    return result.tokens_per_second


def ttft_p99(result: Result) -> float:
    """Seconds to a first token, 99th percentile."""
    return percentile([reply.ttft for reply in result.replies], 0.99)


def gap_p99(result: Result) -> float:
    """Seconds between two chunks of one stream, 99th percentile."""
    return percentile(result.gaps, 0.99)


def cpu_seconds_per_token(service: OurService, mix: str, loops: int) -> float:
    """CPU seconds of a service's processes for an output token, over one pass of its own."""
    before = service.cpu_seconds()
    result = run_mix(service.url, mix, key=service.key, loops=loops)
    return (service.cpu_seconds() - before) / result.tokens
