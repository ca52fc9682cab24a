"""Traffic as options say it: `lognormal:1000:0.8:32:8192`, `zipf:1.1`, `gamma:2`."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from engine.simulation.figures import Slo
from engine.simulation.lengths import (
    CappedLength,
    EmpiricalLength,
    FixedLength,
    Lengths,
    LognormalLength,
)
from engine.simulation.popularity import Popularity, one_hot, uniform, zipf

T = TypeVar("T")


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


def read_new_file(spec: str) -> Path:
    """A file that is written in the end; that it cannot be is an error before the work."""
    path = Path(spec)
    if path.is_dir():
        raise ValueError("it is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("it cannot be written")
    return path


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


def traffic_settings(
    variation: float | None, prompts: Lengths, outputs: Lengths
) -> list[tuple[str, str]]:
    """What a report says of traffic that was drawn: in the words of the options."""
    return [
        ("arrivals", _arrivals_words(variation)),
        ("prompts", _length_words(prompts)),
        ("outputs", _length_words(outputs)),
    ]


def _length_words(lengths: Lengths) -> str:
    match lengths:
        case FixedLength(length):
            return f"fixed:{length}"
        case LognormalLength(mean=mean, sigma=sigma, shortest=shortest, longest=longest):
            return f"lognormal:{mean:g}:{sigma:g}:{shortest}:{longest}"
        case EmpiricalLength(seen):
            return f"{len(seen):,} that were seen"
        case CappedLength(capped, longest):
            return f"{_length_words(capped)}, at most {longest:,} tokens"
        case _:
            return str(lengths)


def _arrivals_words(variation: float | None) -> str:
    if variation is None:
        return "bursty"
    return "poisson" if variation == 1.0 else f"gamma:{variation:g}"


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


def traffic_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add `prompts`, `outputs`, `variation`, `popularity` and `trace`."""
    lengths = Spec("lengths", read_lengths)
    for option in (
        click.option(
            "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Replay JSONL: at, prompt_tokens, output_tokens, tenant, adapter.",
        ),
        click.option(
            "--popularity", type=Spec("popularity", read_popularity), default="zipf",
            show_default=True, help="Of adapters: uniform, zipf[:EXPONENT] or hot[:SHARE].",
        ),
        click.option(
            "--arrivals", "variation", type=Spec("arrivals", read_variation), default="poisson",
            show_default=True, help="poisson, gamma:VARIATION or bursty.",
        ),
        click.option(
            "--outputs", type=lengths, default="lognormal:250:0.8:8:2048", show_default=True,
        ),
        click.option(
            "--prompts", type=lengths, default="lognormal:1000:0.8:32:8192", show_default=True,
            help="Tokens: fixed:N, lognormal:MEAN[:SIGMA[:SHORTEST:LONGEST]] or @FILE, a number "
            "a line.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def slo_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add `--slo-ttft-ms` and `--slo-tpot-ms`, and hand the command an `Slo` as `slo`."""

    @click.option("--slo-ttft-ms", type=click.FloatRange(0), default=500.0, show_default=True)
    @click.option("--slo-tpot-ms", type=click.FloatRange(0), default=80.0, show_default=True)
    @functools.wraps(command)
    def wrapped(*args: Any, slo_ttft_ms: float, slo_tpot_ms: float, **kwargs: Any) -> T:
        return command(*args, slo=Slo(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3), **kwargs)

    return wrapped


def file_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add `--json` and `--html`: files to write."""
    file = Spec("file", read_new_file)
    for option in (
        click.option("--html", "html_file", type=file, help="Write a report with plots."),
        click.option("--json", "json_file", type=file, help="Write all rows to this file."),
    ):
        command = option(command)
    return command
