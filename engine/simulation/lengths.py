"""How long prompts and outputs are: distributions of token counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol


class Lengths(Protocol):
    """Draws token counts of at least 1."""

    def draw(self, random: Random) -> int:
        """One length."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a length must be at least 1, not {self.length}")

    def draw(self, random: Random) -> int:
        """See `Lengths`."""
        return self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLength:
    """Lognormal with this mean, before it is clipped to `shortest .. longest` and rounded."""

    mean: float
    sigma: float = 0.8
    """Standard deviation of the logarithm."""
    shortest: int = 1
    longest: int = 2**20

    def __post_init__(self) -> None:
        if not (self.mean > 0 and self.sigma >= 0 and 1 <= self.shortest <= self.longest):
            raise ValueError(f"not a distribution of lengths: {self}")

    def draw(self, random: Random) -> int:
        """See `Lengths`."""
        length = random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return round(min(max(length, self.shortest), self.longest))


@dataclass(frozen=True, slots=True)
class EmpiricalLength:
    """One of the observed lengths, each equally likely."""

    lengths: Sequence[int]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError("lengths that were seen must be one or more, each at least 1")

    def draw(self, random: Random) -> int:
        """See `Lengths`."""
        return random.choice(self.lengths)


@dataclass(frozen=True, slots=True)
class CappedLength:
    """Draws from another distribution, cut to a maximum."""

    lengths: Lengths
    longest: int

    def draw(self, random: Random) -> int:
        """See `Lengths`."""
        return min(self.longest, self.lengths.draw(random))


def mean_longest(lengths: Lengths, width: int, random: Random, num_batches: int = 2000) -> float:
    """E[the longest of `width` lengths], by Monte Carlo."""
    longest = (max(lengths.draw(random) for _ in range(width)) for _ in range(num_batches))
    return sum(longest) / num_batches
