"""Which adapter, and so which tenant, a request is for."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Popularity:
    """Adapters 0 .. n - 1, drawn with these cumulative weights."""

    cumulative: tuple[float, ...]

    def draw(self, random: Random) -> int:
        """An adapter's number."""
        return random.choices(range(len(self.cumulative)), cum_weights=self.cumulative)[0]


def uniform(num_adapters: int) -> Popularity:
    """All equally popular."""
    return _popularity([1.0] * num_adapters)


def zipf(num_adapters: int, exponent: float = 1.0) -> Popularity:
    """The k-th most popular has a share in proportion to k^-exponent."""
    return _popularity([(rank + 1) ** -exponent for rank in range(num_adapters)])


def one_hot(num_adapters: int, share: float = 0.5) -> Popularity:
    """Adapter 0 has this share of the requests, the others the rest in equal parts."""
    if not 0 <= share <= 1:
        raise ValueError(f"the hot adapter's share must be 0 to 1, not {share}")
    if num_adapters == 1:
        return uniform(1)
    num_others = num_adapters - 1
    return _popularity([share, *[(1 - share) / num_others] * num_others])


def weighted(counts: Sequence[float]) -> Popularity:
    """In proportion to how often each was seen."""
    return _popularity(counts)


def _popularity(weights: Sequence[float]) -> Popularity:
    if not weights:
        raise ValueError("there must be at least one adapter")
    return Popularity(tuple(itertools.accumulate(weights)))
