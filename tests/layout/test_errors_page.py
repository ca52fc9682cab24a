"""docs/errors.md lists every reason code that an answer can carry, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("adapter_store", "engine", "platform/loraplex")
NAMES = ("code", "error_code")
CODE = re.compile(r"[a-z]+(?:_[a-z]+)+")
# Told to clients under another code: `engine_unavailable`, `schema_too_complex`.
TRANSLATED = {"draining", "grammar_failed"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _trees() -> list[ast.Module]:
    return [
        ast.parse(path.read_text())
        for source in SOURCES
        for path in sorted((ROOT / source).rglob("*.py"))
    ]


def _place_of_code(function: Function) -> int | None:
    """Which positional argument is the code, `self` not counted."""
    names = [argument.arg for argument in function.args.args]
    if names[:1] in (["self"], ["cls"]):
        del names[0]
    return next((names.index(name) for name in NAMES if name in names), None)


def _places(nodes: list[ast.AST]) -> dict[str, int]:
    """By function or class: which positional argument is the code."""
    places: dict[str, int] = {}
    bases: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, Function) and (place := _place_of_code(node)) is not None:
            places[node.name] = place
        if isinstance(node, ast.ClassDef):
            bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            for made in node.body:
                if isinstance(made, Function) and made.name == "__init__":
                    bases[node.name] = []
                    if (place := _place_of_code(made)) is not None:
                        places[node.name] = place
    for _ in range(3):  # as many generations as there are
        for name, parents in bases.items():
            for parent in parents:
                if parent in places:
                    places.setdefault(name, places[parent])
    places.pop("__init__", None)
    return places


def _codes_of_parents(nodes: list[ast.AST], places: dict[str, int]) -> Iterator[ast.AST]:
    """What classes hand to `super().__init__` as the code."""
    for made in nodes:
        if not isinstance(made, ast.ClassDef):
            continue
        parents = [base.id for base in made.bases if isinstance(base, ast.Name)]
        place = next((places[parent] for parent in parents if parent in places), None)
        for node in ast.walk(made):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"),
                    args=args,
                ) if place is not None and place < len(args):
                    yield args[place]
                case _:
                    pass


def _constants(nodes: list[ast.AST]) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _codes(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """The expressions that give a code."""
    places = _places(nodes)
    yield from _codes_of_parents(nodes, places)
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                place = places.get(name)
                if place is not None and place < len(node.args):
                    yield node.args[place]
                yield from (each.value for each in node.keywords if each.arg in NAMES)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name in NAMES or (name.endswith("_CODES") and isinstance(value, ast.Dict)):
                    yield value
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                if name in NAMES:
                    yield value
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "code":
                        yield value
            case ast.arguments():
                positional = node.args[len(node.args) - len(node.defaults) :]
                defaults = [
                    *zip(positional, node.defaults, strict=True),
                    *zip(node.kwonlyargs, node.kw_defaults, strict=True),
                ]
                yield from (value for name, value in defaults if name.arg in NAMES and value)
            case _:
                pass


def _texts(value: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    if isinstance(value, ast.Dict):
        for each in value.values:
            yield from _texts(each, constants)
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body, constants)
        yield from _texts(value.orelse, constants)
    elif isinstance(value, ast.Call):  # the default of a `get`
        for each in value.args:
            yield from _texts(each, constants)
    elif isinstance(value, ast.Name):
        yield constants.get(value.id, "")
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def _told() -> set[str]:
    nodes = [node for tree in _trees() for node in ast.walk(tree)]
    constants = _constants(nodes)
    texts = {text for value in _codes(nodes) for text in _texts(value, constants)}
    return {text for text in texts if CODE.fullmatch(text) or text == "interrupted"}


def _listed() -> set[str]:
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    first_cells = [line.split("|")[1] for line in lines if line.startswith("|")]
    return {code for cell in first_cells for code in re.findall(r"`([a-z_]+)`", cell)}


def test_the_page_of_errors_lists_every_code_and_no_other():
    told, listed = _told() - TRANSLATED, _listed()
    assert len(told) > 100, "the search for codes finds them"
    assert (sorted(told - listed), sorted(listed - told)) == ([], [])
