"""The example adapters and questions that `loraplex demo` and the tests use.

Reads the checkout's `examples/` folder. The wheel carries no adapters: from a wheel, the caller
names a folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from loraplex.demo_predicates import PREDICATES

_T = TypeVar("_T")


class ExamplesError(Exception):
    """The examples folder is missing or not as it should be; the message names the fix."""


class DemoAdapter(msgspec.Struct, frozen=True):
    """One example adapter: its PEFT folder and what a person should see in its answers."""

    name: str
    folder: Path
    description: str
    holds: Callable[[str], bool]
    max_tokens: int


class Questions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`demo` are the questions shown, `held_out` those that tests ask; none was trained on."""

    demo: tuple[str, ...]
    held_out: tuple[str, ...]


class _Demo(msgspec.Struct, forbid_unknown_fields=True):
    description: str
    predicate: str
    max_tokens: int


def find_examples(explicit: Path | None = None) -> Path:
    """The folder named, else `examples/` of the checkout this package runs from."""
    folder = explicit or Path(__file__).resolve().parents[2] / "examples"
    if not (folder / "questions.json").is_file():
        raise ExamplesError(
            f"No example adapters in {folder}. They ship with the source, not with the wheel: "
            "run from a checkout, or name its folder with --examples DIR."
        )
    return folder


def load_questions(folder: Path) -> Questions:
    """Read `questions.json`. Raises `ExamplesError`."""
    return _decode(folder / "questions.json", Questions)


def load_adapters(folder: Path) -> tuple[DemoAdapter, ...]:
    """Read every `adapters/*/demo.json`, sorted by name. Raises `ExamplesError`."""
    paths = sorted(folder.glob("adapters/*/demo.json"))
    if not paths:
        raise ExamplesError(
            f"No adapters in {folder / 'adapters'}. Restore them with git, or train them with "
            "python examples/train_adapters.py."
        )
    return tuple(_load_adapter(path) for path in paths)


def _load_adapter(path: Path) -> DemoAdapter:
    demo = _decode(path, _Demo)
    if demo.predicate not in PREDICATES:
        raise ExamplesError(
            f"{path} names the predicate {demo.predicate!r}; there are {', '.join(PREDICATES)}."
        )
    return DemoAdapter(
        name=path.parent.name,
        folder=path.parent,
        description=demo.description,
        holds=PREDICATES[demo.predicate],
        max_tokens=demo.max_tokens,
    )


def _decode(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ExamplesError(f"Cannot read {path}: {error}. Restore it with git.") from error
