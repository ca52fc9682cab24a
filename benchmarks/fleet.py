"""What a simulated fleet costs: `python -m benchmarks.fleet [--requests N] [--processes N]`.

A million requests over 2,000 adapters of 200 tenants (Zipf) and 64 replicas behind the affinity
router, by default. Prints wall and CPU seconds, microseconds a row-step, and the processes' memory
as it goes: it does not grow with the number of requests. Takes 10 minutes on two cores.
"""

import argparse
import time
from collections.abc import Sequence

import psutil

from benchmarks.serving.figures import machine
from engine.simulation.fleet import Fleet, simulate_fleet
from engine.simulation.lengths import LognormalLength
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.popularity import zipf
from engine.simulation.roofline import H100
from engine.simulation.study import CHUNKED_512, Study

MEBIBYTE = 2**20


class MemoryWatch:
    """The children's resident memory at each tenth of the way."""

    def __init__(self, num_requests: int) -> None:
        self.seen: list[float] = []
        self._num_requests = num_requests

    def __call__(self, done: int) -> None:
        if done * 10 >= (len(self.seen) + 1) * self._num_requests:
            children = psutil.Process().children()
            held = sum(child.memory_info().rss for child in children) / MEBIBYTE
            self.seen.append(held)
            print(f"{done:,} requests sent, {held:,.0f} MiB", flush=True)


def growth(seen: Sequence[float]) -> float:
    """From the third tenth to the ninth, as a share."""
    return seen[8] / seen[2] - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=10.0, help="of a replica")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    study = Study(
        model=LLAMA_3_1_8B, gpu=H100, num_requests=options.requests,
        popularity=zipf(options.adapters), num_tenants=200, max_loras=32,
        prompts=LognormalLength(mean=500, sigma=0.8, shortest=16, longest=4096),
        outputs=LognormalLength(mean=150, sigma=0.8, shortest=4, longest=1024),
        max_model_len=5121,
    )  # fmt: skip
    fleet = Fleet(
        study=study, policy=CHUNKED_512, rate=options.rate * options.replicas,
        num_replicas=options.replicas,
    )  # fmt: skip
    print(machine(), flush=True)
    watch, began = MemoryWatch(options.requests), time.perf_counter()
    found = simulate_fleet(fleet, num_processes=options.processes, on_progress=watch)
    seconds = time.perf_counter() - began
    times = psutil.Process().cpu_times()
    cpu = times.children_user + times.children_system + times.user + times.system
    print(
        f"{seconds:.0f} s, {cpu:.0f} CPU s, {found.num_rows:,} row-steps, "
        f"{cpu / found.num_rows * 1e6:.2f} us each; simulated {found.seconds:,.0f} s"
    )
    print(
        f"{found.output_tokens_per_second:,.0f} output tokens/s, goodput {found.goodput:.3f}, "
        f"TTFT p50 {1e3 * found.ttft.quantile(0.5):.0f} ms, p99 "
        f"{1e3 * found.ttft.quantile(0.99):.0f} ms, {found.num_installs:,} loads, "
        f"{len(found.adapters):,} adapters asked for, Jain {found.jain:.3f}"
    )
    if len(watch.seen) >= 9:
        print(f"memory from the third to the ninth tenth: {growth(watch.seen):+.0%}")


if __name__ == "__main__":
    main()
