"""The stretch of time that an answer is about, and columns over its buckets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from loraplex.dashboard.views import (
    CauseColumns,
    Causes,
    FinishColumns,
    Finishes,
    PercentileColumns,
    Percentiles,
    Range,
    Window,
)
from loraplex.recorder.engine_bucket import EngineBucket
from loraplex.recorder.traffic import CAUSES, FINISHES, Traffic
from loraplex.recorder.widths import SPANS, first_bucket

T = TypeVar("T")
MIN_COVERED_SECONDS = 1.0
"""A bucket that was watched for less gives no rate."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Buckets of a window up to now; `covered` has the seconds that each was watched for."""

    range_: Range
    now: float
    covered: Mapping[int, float]

    @property
    def width(self) -> int:
        """Seconds of a bucket."""
        return SPANS[self.range_].width

    @property
    def begin(self) -> int:
        """When the first bucket began."""
        return begin_of(self.range_, self.now)

    @property
    def starts(self) -> range:
        """When each bucket began."""
        return range(self.begin, self.begin + SPANS[self.range_].seconds, self.width)

    def window(self, complete_until: float) -> Window:
        """As the pages read it."""
        return Window(
            range=self.range_,
            start=float(self.begin),
            end=self.now,
            step_seconds=float(self.width),
            times=[float(start) for start in self.starts],
            complete_until=complete_until,
        )

    def column(self, parts: Mapping[int, Traffic], value: Callable[[Traffic], T]) -> list[T | None]:
        """A value for each bucket: of nothing where none ended in it, None where it is a gap."""
        empty = Traffic()
        return [
            value(parts.get(start, empty)) if self.covered.get(start) or start in parts else None
            for start in self.starts
        ]

    def rates(
        self, parts: Mapping[int, Traffic], value: Callable[[Traffic], float]
    ) -> list[float | None]:
        """Per second, of the seconds that a bucket was watched for."""
        empty = Traffic()
        return [
            value(parts.get(start, empty)) / covered
            if (covered := self.covered.get(start, 0.0)) >= MIN_COVERED_SECONDS
            else None
            for start in self.starts
        ]

    def gauges(self, engine: Mapping[int, EngineBucket], name: str) -> list[float | None]:
        """The mean of a gauge in each bucket."""
        return [engine[start].mean(name) if start in engine else None for start in self.starts]

    def causes(self, parts: Mapping[int, Traffic]) -> CauseColumns:
        """Queue seconds by cause."""
        return CauseColumns(
            **{
                cause: self.column(parts, lambda part, cause=cause: getattr(part, cause))
                for cause in CAUSES
            }
        )

    def finishes(self, parts: Mapping[int, Traffic]) -> FinishColumns:
        """Requests by how they ended."""
        return FinishColumns(
            **{
                reason: self.column(parts, lambda part, reason=reason: getattr(part, reason))
                for reason in FINISHES
            }
        )

    def percentiles(self, parts: Mapping[int, Traffic], name: str) -> PercentileColumns:
        """Of a distribution."""
        columns = [
            parts[start].quantiles(name) if start in parts else [None] * 3 for start in self.starts
        ]
        return PercentileColumns(*(list(column) for column in zip(*columns, strict=True)))


def begin_of(range_: Range, now: float) -> int:
    """When the first bucket of a window began."""
    return first_bucket(SPANS[range_], now)


def percentiles_of(traffic: Traffic, name: str) -> Percentiles:
    """Of one distribution."""
    return Percentiles(*traffic.quantiles(name))


def causes_of(traffic: Traffic) -> Causes:
    """Queue seconds by cause."""
    return Causes(**{cause: getattr(traffic, cause) for cause in CAUSES})


def finishes_of(traffic: Traffic) -> Finishes:
    """Requests by how they ended."""
    return Finishes(**{reason: getattr(traffic, reason) for reason in FINISHES})
