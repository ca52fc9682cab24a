"""Axes: from values to pixels, with ticks at round numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Axis:
    """`low .. high` on `start .. end` pixels."""

    low: float
    high: float
    start: float
    end: float
    scale: Literal["linear", "log"]
    ticks: Sequence[float]

    def __call__(self, value: float) -> float:
        """The pixel of a value; what lies outside is put at the edge."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.scale == "log":
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def axis(
    values: Sequence[float],
    start: float,
    end: float,
    *,
    scale: Literal["linear", "log"] = "linear",
    from_zero: bool = True,
) -> Axis:
    """An axis on which all values find a place.

    A logarithmic one leaves out values that are not above 0, and is linear if none is.
    """
    positive = [value for value in values if value > 0]
    if scale == "log" and positive:
        ticks = _decades(min(positive), max(positive))
        return Axis(ticks[0], ticks[-1], start, end, "log", ticks)
    low = min([0.0, *values] if from_zero else values, default=0.0)
    high = max(values, default=1.0)
    if high <= low:
        high = low + 1.0
    step = _step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], start, end, "linear", ticks)


def tick_label(value: float) -> str:
    """Short: 1,500 or 0.25."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _step(rough: float) -> float:
    size = 10 ** math.floor(math.log10(rough))
    return next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * 0.999)


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 2:
        return [10.0**power for power in range(first, last + 1)]
    steps = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    start = max((index for index, step in enumerate(steps) if step <= low), default=0)
    end = min((index for index, step in enumerate(steps) if step >= high), default=len(steps) - 1)
    return steps[start : max(end, start + 1) + 1]
