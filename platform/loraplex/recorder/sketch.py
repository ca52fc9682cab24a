"""Distributions as mergeable sketches: small, and with a bound on a quantile's relative error.

DDSketch (Masson, Rim, Lee: https://www.vldb.org/pvldb/vol12/p2195-masson.pdf). The mapping from
values to bins is the library's, which the tests compare with; its own stores are dense, some 550
bins from a millisecond to a minute, where most of ours hold a handful of values in a database row.
"""

from collections.abc import Iterable
from typing import Any, Self

import msgspec
from ddsketch.mapping import LogarithmicMapping

ACCURACY = 0.01
"""A quantile is at most this share of itself off."""

_MAPPING = LogarithmicMapping(ACCURACY)
_SMALLEST = 1e-6
"""Seconds: less counts as none at all, so that no bin is spent on clock noise."""

Packed = list[Any]
"""[zeros, [key, count, key, count, …]], ready for msgpack."""


class Sketch:
    """Counts of non-negative values by bin. Adding and merging are exact in the counts."""

    __slots__ = ("bins", "zeros")

    def __init__(self) -> None:
        self.zeros = 0
        self.bins: dict[int, int] = {}

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """A sketch of these values."""
        sketch = cls()
        for value in values:
            sketch.add(value)
        return sketch

    @classmethod
    def unpack(cls, packed: Packed) -> Self:
        """The sketch that `pack` wrote."""
        sketch = cls()
        sketch.zeros = packed[0]
        flat = packed[1]
        sketch.bins = dict(zip(flat[0::2], flat[1::2], strict=True))
        return sketch

    def pack(self) -> Packed:
        """Its counts, smallest value first."""
        return [self.zeros, [part for item in sorted(self.bins.items()) for part in item]]

    @property
    def count(self) -> int:
        """Values that were added."""
        return self.zeros + sum(self.bins.values())

    def add(self, value: float) -> None:
        """Count a value, 0 or more."""
        if value <= _SMALLEST:
            self.zeros += 1
            return
        key = _MAPPING.key(value)
        self.bins[key] = self.bins.get(key, 0) + 1

    def merge(self, other: "Sketch") -> None:
        """Count all that the other has counted."""
        self.zeros += other.zeros
        bins = self.bins
        for key, count in other.bins.items():
            bins[key] = bins.get(key, 0) + count

    def merge_counts(self, packed: Packed) -> None:
        """Count all that `pack` tells of."""
        self.zeros += packed[0]
        bins, flat = self.bins, packed[1]
        for key, count in zip(flat[0::2], flat[1::2], strict=True):
            bins[key] = bins.get(key, 0) + count

    def quantiles(self, *shares: float) -> list[float | None]:
        """The values below which these shares (ascending) of all lie; None of nothing."""
        count = self.count
        if count == 0:
            return [None] * len(shares)
        found: list[float | None] = []
        bins = iter(sorted(self.bins.items()))
        seen, key = self.zeros, None
        for share in shares:
            rank = share * (count - 1)
            while seen <= rank:
                key, more = next(bins)
                seen += more
            found.append(0.0 if key is None else _MAPPING.value(key))
        return found


def pack_all(sketches: dict[str, Sketch]) -> bytes:
    """Named sketches as bytes, those without a value left out."""
    return msgspec.msgpack.encode({n: s.pack() for n, s in sketches.items() if s.count})


def merge_packed(into: dict[str, Sketch], packed: bytes) -> None:
    """Merge what `pack_all` wrote, name by name."""
    for name, counts in msgspec.msgpack.decode(packed).items():
        mine = into.get(name)
        if mine is None:
            into[name] = Sketch.unpack(counts)
        else:
            mine.merge_counts(counts)
