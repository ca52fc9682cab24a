"""Quantiles of a stream in a fixed number of counters, within 1% of the value.

The mapping of Masson, Rim and Lee, "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees" (VLDB 2019), over a fixed range and with numpy, which takes the gaps of a
whole reply at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

ACCURACY = 0.01
LOWEST, HIGHEST = 1e-6, 1e6
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)
_FIRST = math.floor(math.log(LOWEST) / _LOG_GAMMA)
_NUM_BUCKETS = math.ceil(math.log(HIGHEST) / _LOG_GAMMA) - _FIRST + 2

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


def _no_counts() -> Counts:
    return np.zeros(_NUM_BUCKETS, dtype=np.int64)


@dataclass(slots=True)
class LogHistogram:
    """Values are 0 to 1e6; what is below 1e-6 counts as 0."""

    counts: Counts = field(default_factory=_no_counts)
    """Counts by bucket; the first one is for 0."""
    total: float = 0.0
    highest: float = 0.0

    @property
    def count(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Mean of all values; 0 without any."""
        count = self.count
        return self.total / count if count else 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        bucket = 0
        if value > LOWEST:
            bucket = min(math.ceil(math.log(value) / _LOG_GAMMA) - _FIRST, _NUM_BUCKETS - 1)
        self.counts[bucket] += 1
        self.total += value
        self.highest = max(self.highest, value)

    def add_all(self, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> None:
        """Add several values at once."""
        if not len(values):
            return
        logs = np.log(np.maximum(values, LOWEST)) / _LOG_GAMMA
        buckets = np.ceil(logs).astype(np.int64) - _FIRST
        buckets[values <= LOWEST] = 0
        np.minimum(buckets, _NUM_BUCKETS - 1, out=buckets)
        self.counts += np.bincount(buckets, minlength=_NUM_BUCKETS)
        self.total += float(values.sum())
        self.highest = max(self.highest, float(values.max()))

    def quantile(self, share: float) -> float:
        """The value that this share of them does not exceed; 0 of none."""
        count = self.count
        if not count:
            return 0.0
        rank = max(1, math.ceil(share * count))
        bucket = int(np.searchsorted(np.cumsum(self.counts), rank))
        if bucket == 0:
            return 0.0
        return min(self.highest, 2 * _GAMMA ** (bucket + _FIRST) / (_GAMMA + 1))

    def merge(self, other: "LogHistogram") -> None:
        """Add the values of another histogram."""
        self.counts += other.counts
        self.total += other.total
        self.highest = max(self.highest, other.highest)


def merged(histograms: Sequence[LogHistogram]) -> LogHistogram:
    """All together."""
    result = LogHistogram()
    for histogram in histograms:
        result.merge(histogram)
    return result
