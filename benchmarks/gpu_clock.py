"""Times steps on a CUDA device, or calls on a host where only the path is tried."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

from benchmarks.gpu_cases import Rates

_REPEATS = 15
_WARM_UPS = 3


class Clock(Protocol):
    """How long work takes."""

    def microseconds(self, run: Callable[[], object], *, is_captured: bool = True) -> float:
        """Median of several runs.

        `is_captured`: what it queues takes the device longer than the host, so that events around
        several runs in a row count the device's time; else the clock on the wall does.
        """
        ...

    def rates(self) -> Rates:
        """Of a large copy and a large GEMM."""
        ...

    def wait(self) -> None:
        """Until all that was queued is over."""
        ...


class DeviceClock:
    """A `Clock` of the current CUDA device."""

    def microseconds(self, run: Callable[[], object], *, is_captured: bool = True) -> float:
        """See `Clock.microseconds`."""
        for _ in range(_WARM_UPS):
            run()
        self.wait()
        if not is_captured:
            return _wall_microseconds(run, self.wait)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.wait()
        gaps = [a.elapsed_time(b) for a, b in pairwise(events)]
        return 1e3 * median(gaps)

    def rates(self) -> Rates:
        """See `Clock.rates`."""
        # Late: it is written for CUDA alone.
        from benchmarks.gpu_timing import Stopwatch

        return Stopwatch().rates()

    def wait(self) -> None:
        """See `Clock.wait`."""
        torch.cuda.synchronize()


class HostClock:
    """A `Clock` that lets a CPU try the paths; its rates are assumed."""

    def microseconds(self, run: Callable[[], object], *, is_captured: bool = True) -> float:
        """See `Clock.microseconds`; one run."""
        return _wall_microseconds(run, self.wait, repeats=1)

    def rates(self) -> Rates:
        """See `Clock.rates`."""
        return Rates(bytes_per_second=1e10, flops_per_second=1e11)

    def wait(self) -> None:
        """Nothing is queued on a CPU."""


def _wall_microseconds(
    run: Callable[[], object], wait: Callable[[], None], repeats: int = _REPEATS
) -> float:
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    return 1e6 * median(times)
