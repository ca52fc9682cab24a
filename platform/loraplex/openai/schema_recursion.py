"""Schemas that contain themselves without a way out: only JSON without an end would fulfil them.

A grammar of one compiles, and a reply that is held to it never ends. Found by unit propagation over
Horn clauses (Dowling and Gallier, 1984), in time linear in the schema: a part is finite once each
of its `groups` has a finite member.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties")
_SCHEMAS = ("additionalProperties", "items", "additionalItems")
_CONTAINERS = frozenset(("object", "array"))


class Pointer(NamedTuple):
    """Where a part of a schema is, and which of its types is meant: all of them if None."""

    steps: tuple[str, ...]
    type: str | None = None


class _Part(NamedTuple):
    groups: Sequence[Sequence[Pointer]]
    """Each needs a finite member; none at all: finite."""
    others: Sequence[Pointer]
    """What it may contain besides."""


def endless_part(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the steps to a part that nothing finite fulfils, the outermost; None if there is none.

    Parts count that a reply can reach, optional ones too: a reply that begins one never ends it.
    References that lead nowhere are taken as finite, for others refuse them by name.
    """
    parts: dict[Pointer, _Part] = {}
    queue = deque([Pointer(())])
    while queue:
        pointer = queue.popleft()
        if pointer not in parts:
            part = parts[pointer] = _part_at(schema, pointer)
            queue.extend(member for group in part.groups for member in group)
            queue.extend(part.others)
    finite = _finite(parts)
    return next((pointer.steps for pointer in parts if pointer not in finite), None)


def _finite(parts: Mapping[Pointer, _Part]) -> set[Pointer]:
    missing = {pointer: len(part.groups) for pointer, part in parts.items()}
    waiting: dict[Pointer, list[tuple[Pointer, int]]] = {}
    for pointer, part in parts.items():
        for number, group in enumerate(part.groups):
            for member in group:
                waiting.setdefault(member, []).append((pointer, number))
    fulfilled: set[tuple[Pointer, int]] = set()
    finite = {pointer for pointer, count in missing.items() if count == 0}
    ready = deque(finite)
    while ready:
        for asker in waiting.get(ready.popleft(), ()):
            if asker not in fulfilled:
                fulfilled.add(asker)
                missing[asker[0]] -= 1
                if missing[asker[0]] == 0:
                    finite.add(asker[0])
                    ready.append(asker[0])
    return finite


def _part_at(root: Mapping[str, Any], pointer: Pointer) -> _Part:
    found = _find(root, pointer.steps)
    if not isinstance(found, dict):
        return _Part((), ())
    schema, steps = cast(dict[str, Any], found), pointer.steps
    if pointer.type == "object":
        return _Part(list(_object_groups(schema, steps)), ())
    if pointer.type == "array":
        return _Part(list(_array_groups(schema, steps)), ())
    groups: list[Sequence[Pointer]] = []
    target = _target(root, schema.get("$ref"))
    if target is not None:
        groups.append([target])
    groups.extend([member] for member in _members(schema, steps, "allOf"))
    groups.extend(
        members for key in ("anyOf", "oneOf") if (members := list(_members(schema, steps, key)))
    )
    types = _types(schema)
    if types and types <= _CONTAINERS and not {"const", "enum"} & schema.keys():
        groups.append([Pointer(steps, type_) for type_ in sorted(types)])
    return _Part(groups, list(_children(schema, steps)))


def _object_groups(schema: Mapping[str, Any], steps: tuple[str, ...]) -> Iterator[list[Pointer]]:
    named = _mapping(schema.get("properties"))
    patterns = _mapping(schema.get("patternProperties"))
    others = Pointer((*steps, "additionalProperties"))
    required = schema.get("required")
    for name in cast(list[Any], required) if isinstance(required, list) else ():
        if name in named:
            yield [Pointer((*steps, "properties", name))]
        elif not patterns:
            yield [others]  # finite where there is none
    least = schema.get("minProperties")
    if isinstance(least, int) and least > 0 and not required:
        yield [
            *(Pointer((*steps, "properties", name)) for name in named),
            *(Pointer((*steps, "patternProperties", name)) for name in patterns),
            others,
        ]


def _array_groups(schema: Mapping[str, Any], steps: tuple[str, ...]) -> Iterator[list[Pointer]]:
    least = schema.get("minItems")
    if not isinstance(least, int):
        return
    first = list(_members(schema, steps, "prefixItems"))
    yield from ([member] for member in first[:least])
    if least > len(first):
        yield [Pointer((*steps, "items"))]


def _children(schema: Mapping[str, Any], steps: tuple[str, ...]) -> Iterator[Pointer]:
    for key in _SCHEMA_LISTS:
        yield from _members(schema, steps, key)
    for key in _NAMED_SCHEMAS:
        for name in _mapping(schema.get(key)):
            yield Pointer((*steps, key, name))
    for key in _SCHEMAS:
        if key in schema:
            yield Pointer((*steps, key))


def _members(schema: Mapping[str, Any], steps: tuple[str, ...], key: str) -> Iterator[Pointer]:
    found = schema.get(key)
    if isinstance(found, list):
        for index in range(len(cast(list[Any], found))):
            yield Pointer((*steps, key, str(index)))


def _types(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("type")
    names = cast(list[Any], found) if isinstance(found, list) else [found]
    return {name for name in names if isinstance(name, str)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _target(root: Mapping[str, Any], reference: Any) -> Pointer | None:
    if not isinstance(reference, str):
        return None
    base, has_fragment, fragment = reference.partition("#")
    if base not in ("", root.get("$id")) or (fragment and not fragment.startswith("/")):
        return None
    if not fragment:
        return Pointer(()) if has_fragment or base else None
    return Pointer(
        tuple(
            unquote(step).replace("~1", "/").replace("~0", "~") for step in fragment[1:].split("/")
        )
    )


def _find(root: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if isinstance(root, dict):
            root = cast(dict[str, Any], root).get(step)
        elif isinstance(root, list) and step.isascii() and step.isdigit() and len(step) < 7:
            items = cast(list[Any], root)
            root = items[int(step)] if int(step) < len(items) else None
        else:
            return None
    return root
