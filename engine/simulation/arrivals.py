"""When requests come: endless streams of times in seconds, never falling."""

from collections.abc import Iterator
from random import Random


def poisson(rate: float, random: Random) -> Iterator[float]:
    """Independent arrivals, `rate` a second on average."""
    return gamma(rate, 1.0, random)


def gamma(rate: float, variation: float, random: Random) -> Iterator[float]:
    """Gamma-distributed gaps: `variation` is their standard deviation over their mean.

    1 is a Poisson process, 0 a metronome, more than 1 bursts.
    """
    _check(rate > 0, f"the rate must be above 0, not {rate}")
    _check(variation >= 0, f"the variation must be at least 0, not {variation}")
    now = 0.0
    while True:
        now += _gap(rate, variation, random)
        yield now


def bursty(
    rate: float, random: Random, *, factor: float = 4.0, calm: float = 20.0, burst: float = 5.0
) -> Iterator[float]:
    """Poisson arrivals of `rate` a second on average, at `factor` times as many in bursts as in
    between; calm and burst last `calm` and `burst` seconds on average, exponentially distributed.
    """
    _check(rate > 0, f"the rate must be above 0, not {rate}")
    _check(factor >= 1 and calm > 0 and burst > 0, "a burst must be busier than calm")
    base = rate * (calm + burst) / (calm + factor * burst)
    now, is_burst = 0.0, False
    while True:
        end = now + random.expovariate(1 / (burst if is_burst else calm))
        # A Poisson process has no memory: a gap that a turn cuts may be drawn anew.
        while (now := now + random.expovariate(base * (factor if is_burst else 1.0))) < end:
            yield now
        now, is_burst = end, not is_burst


def _gap(rate: float, variation: float, random: Random) -> float:
    if variation == 0:
        return 1 / rate
    if variation == 1:
        return random.expovariate(rate)
    shape = variation**-2
    return random.gammavariate(shape, 1 / (rate * shape))


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
