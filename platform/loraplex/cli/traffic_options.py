"""Traffic as options say it: `lognormal:1000:0.8:32:8192`, `zipf:1.1`, `gamma:2`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from engine.simulation.lengths import EmpiricalLength, FixedLength, Lengths, LognormalLength
from engine.simulation.popularity import Popularity, one_hot, uniform, zipf


class Spec(click.ParamType[Any, Any]):
    """An option whose value a function reads; its ValueError is the user's error."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except (ValueError, OSError) as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def read_lengths(spec: str) -> Lengths:
    """`fixed:N`, `lognormal:MEAN[:SIGMA[:SHORTEST:LONGEST]]`, or `@FILE` with a length a line."""
    if spec.startswith("@"):
        return EmpiricalLength(tuple(map(int, Path(spec[1:]).read_text().split())))
    kind, *numbers = spec.split(":")
    match kind, numbers:
        case "fixed", [length]:
            return FixedLength(int(length))
        case "lognormal", [mean]:
            return LognormalLength(mean=float(mean))
        case "lognormal", [mean, sigma]:
            return LognormalLength(mean=float(mean), sigma=float(sigma))
        case "lognormal", [mean, sigma, shortest, longest]:
            return LognormalLength(
                mean=float(mean), sigma=float(sigma), shortest=int(shortest), longest=int(longest)
            )
        case _:
            raise ValueError("not fixed:N, lognormal:MEAN[:SIGMA[:SHORTEST:LONGEST]] or @FILE")


def read_variation(spec: str) -> float | None:
    """`poisson`, `gamma:VARIATION` or `bursty`, as `Study.variation`."""
    kind, *numbers = spec.split(":")
    match kind, numbers:
        case "poisson", []:
            return 1.0
        case "bursty", []:
            return None
        case "gamma", [variation] if float(variation) >= 0:
            return float(variation)
        case _:
            raise ValueError("not poisson, gamma:VARIATION or bursty")


def read_popularity(spec: str) -> Callable[[int], Popularity]:
    """`uniform`, `zipf[:EXPONENT]` or `hot[:SHARE]`: a function of how many adapters there are."""
    kind, *numbers = spec.split(":")
    match kind, [float(number) for number in numbers]:
        case "uniform", []:
            return uniform
        case "zipf", [] | [_] as given:
            return lambda num_adapters: zipf(num_adapters, *given)
        case "hot", [] | [_] as given:
            one_hot(2, *given)
            return lambda num_adapters: one_hot(num_adapters, *given)
        case _:
            raise ValueError("not uniform, zipf[:EXPONENT] or hot[:SHARE]")
