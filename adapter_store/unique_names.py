"""JSON whose objects name everything once: of two fields of a name `json` would take the last."""

import json
from typing import Any


class RepeatedName(ValueError):
    """An object has a name twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name!r} is there twice")
        self.name = name


def load_unique(raw: bytes) -> Any:
    """Read JSON; raises `RepeatedName`, or as `json.loads` does `ValueError`, `RecursionError`."""
    return json.loads(raw.decode(), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise RepeatedName(name)
        fields[name] = value
    return fields
