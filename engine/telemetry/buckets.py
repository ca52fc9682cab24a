"""The histograms' bounds: the largest value of each bucket but the last one, which has none.

Fixed, so that counts of several engines can be added. Around the objective's defaults they are
fine enough to read a share of good requests off them.
"""

from bisect import bisect_left

from engine.telemetry.records import Histogram

Bounds = tuple[float, ...]

QUEUE_SECONDS: Bounds = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TTFT_SECONDS: Bounds = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SECONDS_PER_TOKEN: Bounds = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5)
REQUEST_SECONDS: Bounds = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
LOAD_SECONDS: Bounds = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_SECONDS: Bounds = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25,
                        0.5, 1.0, 2.5)  # fmt: skip
STEP_ROWS: Bounds = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
STEP_TOKENS: Bounds = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
STEP_ADAPTERS: Bounds = (0, 1, 2, 4, 8, 16, 32, 64)


def empty(bounds: Bounds) -> Histogram:
    """A histogram without observations."""
    return Histogram([0] * (len(bounds) + 1))


def observe(histogram: Histogram, bounds: Bounds, value: float) -> None:
    """Count a value; one that equals a bound belongs to that bound's bucket."""
    histogram.counts[bisect_left(bounds, value)] += 1
    histogram.sum += value


def add(histogram: Histogram, other: Histogram) -> None:
    """Add another histogram of the same bounds."""
    histogram.counts = [a + b for a, b in zip(histogram.counts, other.counts, strict=True)]
    histogram.sum += other.sum
