"""From JSON schemas to grammars that the engine can keep a reply within (llguidance's)."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import llguidance

from loraplex.errors import InvalidRequest
from loraplex.settings import RequestLimits

_OPTIONS: Mapping[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    # Small models would go on with spaces for ever.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}",
    "coerce_one_of": False,
    "lenient": False,
}
_OPTIONS_KEY = "x-guidance"
"""Where llguidance looks for options in a schema: they are ours to set, and no client's."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_DATA_KEYWORDS = frozenset(("const", "default", "enum", "example", "examples"))
_NAMED_SCHEMAS = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)


def json_schema_grammar(schema: Any) -> str:
    """Return the grammar of a schema's JSON texts; nothing is checked yet."""
    return llguidance.LLMatcher.grammar_from_json_schema(_as_text(schema))


def check_schema(schema: Any, param: str, limits: RequestLimits) -> None:
    """Raise `InvalidRequest` for a schema that is no object, too large or too deep."""
    if not isinstance(schema, dict):
        raise InvalidRequest(param, f"`{param}` must be a JSON schema, an object")
    if len(_as_text(cast(dict[str, Any], schema)).encode()) > limits.max_schema_bytes:
        raise InvalidRequest(
            param,
            f"`{param}` may have {limits.max_schema_bytes} bytes at most",
            code="schema_too_large",
        )
    if _depth(schema) > limits.max_schema_depth:
        raise InvalidRequest(
            param,
            f"`{param}` may be nested {limits.max_schema_depth} levels deep at most",
            code="schema_too_deep",
        )


def schema_error(message: str, schemas: Mapping[str, Any]) -> InvalidRequest:
    """Return the refusal of what llguidance says `message` about; `schemas` by their field."""
    param = next(iter(schemas))
    unimplemented = _UNIMPLEMENTED.search(message)
    if unimplemented is None:
        return InvalidRequest(
            param, f"`{param}` cannot be used: {message}", code="invalid_json_schema"
        )
    keywords: list[str] = json.loads(unimplemented[1])
    for field, schema in schemas.items():
        for path in _paths_of(schema, frozenset(keywords), field):
            return _unsupported(path, path.rpartition(".")[2])
    return _unsupported(param, ", ".join(keywords))


def _unsupported(path: str, keyword: str) -> InvalidRequest:
    return InvalidRequest(
        path,
        f"`{path}`: replies cannot be held to the keyword `{keyword}`: leave it out",
        code="unsupported_schema_keyword",
    )


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that says how its JSON may be laid out."""
    return {**schema, _OPTIONS_KEY: dict(_OPTIONS)}


def _as_text(schema: Mapping[str, Any]) -> str:
    return json.dumps(with_options(schema), ensure_ascii=False, separators=(",", ":"))


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, cast(dict[str, Any], value).values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, cast(list[Any], value)), default=0)
    return 0


def _paths_of(schema: Any, keywords: frozenset[str], path: str) -> Iterator[str]:
    if isinstance(schema, list):
        for index, item in enumerate(cast(Sequence[Any], schema)):
            yield from _paths_of(item, keywords, f"{path}[{index}]")
    if not isinstance(schema, dict):
        return
    for name, value in cast(dict[str, Any], schema).items():
        if name in keywords:
            yield f"{path}.{name}"
        elif name in _NAMED_SCHEMAS and isinstance(value, dict):
            for key, item in cast(dict[str, Any], value).items():
                yield from _paths_of(item, keywords, f"{path}.{name}.{key}")
        elif name not in _DATA_KEYWORDS:
            yield from _paths_of(value, keywords, f"{path}.{name}")
