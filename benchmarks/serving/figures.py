"""Percentiles, medians over passes, and tables: how the benchmarks say what they measured."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np


def percentile(values: Sequence[float], fraction: float) -> float:
    """As load tests and simulations count it, between two values; `values` has at least one."""
    return float(np.quantile(values, fraction))


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Mean, median and 99th percentile, times `scale`; NaN of nothing."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p99"), float("nan"))
    return {
        "mean": scale * statistics.mean(values),
        "p50": scale * percentile(values, 0.5),
        "p99": scale * percentile(values, 0.99),
    }


def over_passes(values: Sequence[float], digits: int = 0) -> str:
    """The median, and the extremes where there is more than one pass."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal; the first one is text."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(columns), f"|{rule}|", *map(line, rows)])


def machine() -> str:
    """One line about where the numbers come from: processor, cores, memory, load, versions."""
    fields = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        fields[0] if fields else platform.machine(),
        f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB",
        f"load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
        *_versions("torch", "loraplex"),
    ]
    return "; ".join(parts)


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Leave the results for another program, if a path was asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


def _versions(*packages: str) -> list[str]:
    found: list[str] = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
