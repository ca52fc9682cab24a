"""A mean and its 95% interval: what interleaved pairs have to say about small differences."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, two-sided 95%, by degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


def interval(values: Sequence[float]) -> Interval:
    """Of values that are about normal; at least two."""
    mean = statistics.mean(values)
    degrees = len(values) - 1
    t = _T95[degrees - 1] if degrees <= len(_T95) else 2.1
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def added(over: Sequence[float], under: Sequence[float]) -> Interval:
    """How much more `over` is than `under`, as a share of it, pair by pair."""
    return interval([a / b - 1.0 for a, b in zip(over, under, strict=True)])
