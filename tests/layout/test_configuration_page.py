"""docs/configuration.md lists every option and variable of `loraplex serve`, with its default."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from engine.engine_args import EngineArgs
from loraplex.cli.serve import serve
from loraplex.settings import PREFIX, Settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
# `serve` gives these itself, whatever the environment says.
NO_VARIABLES = {
    "api_processes", "blobs_dir", "cache_dir", "engine_socket", "hang_seconds", "metrics_fd",
    "model_dir", "model_name", "served_model_names", "uploads_dir", "usage_dir",
}  # fmt: skip
# `serve` gives these to the engine itself.
NO_OPTIONS = {"cache_dir", "generation", "model_dir", "model_name", "parent_pid", "socket_path"}
OPTIONS_OF = {"enable_prefix_cache": "--no-prefix-cache", "num_threads": "--threads"}
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _rows() -> list[list[str]]:
    lines = (line for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _by_name(pattern: str) -> dict[str, list[str]]:
    """Rows by the options or variables in their first cell."""
    return {name: row for row in _rows() for name in re.findall(pattern, row[0])}


def _values(cell: str) -> Iterator[float]:
    """The numbers in a cell: `20 GiB`, `32 (256)`, `127.0.0.1, 8000`."""
    for number, unit in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)(?![\w.]\d)(?: ([KMG]iB))?", cell):
        yield float(number) * UNITS.get(unit, 1)


def _fields(settings: Any) -> Iterator[msgspec.structs.FieldInfo]:
    for field in msgspec.structs.fields(settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _fields(field.type)
        elif field.name not in NO_VARIABLES:
            yield field


def test_every_option_is_listed_with_its_variable_and_its_default():
    rows = _by_name(r"`(--[a-z-]+)`")
    options = {max(option.opts, key=len): option for option in serve.params}
    assert sorted(rows) == sorted(options)
    for name, option in options.items():
        assert isinstance(option, click.Option)
        row = rows[name]
        if option.envvar is not None:
            assert f"`{option.envvar}`" in row[1], name
        if isinstance(option.default, int | float) and not isinstance(option.default, bool):
            assert option.default in _values(row[2]), name
        elif isinstance(option.default, str):
            assert option.default in row[2], name


def test_every_argument_of_the_engine_has_an_option():
    options = {option for parameter in serve.params for option in parameter.opts}
    fields = {field.name for field in msgspec.structs.fields(EngineArgs)} - NO_OPTIONS
    named = {OPTIONS_OF.get(field, f"--{field.replace('_', '-')}") for field in fields}
    assert named - options == set()


def test_every_variable_is_listed_with_its_default():
    rows = _by_name(r"`(LORAPLEX_[A-Z_]+)`")
    of_options = {name for row in _rows() for name in re.findall(r"LORAPLEX_[A-Z_]+", row[1])}
    fields = {PREFIX + field.name.upper(): field for field in _fields(Settings)}
    assert sorted(rows) == sorted(set(fields) - of_options)
    for name, row in rows.items():
        if isinstance(fields[name].default, int | float):
            assert fields[name].default in _values(row[1]), name
