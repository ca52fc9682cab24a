"""Schemas that contain themselves: those with a way out are served, the others refused by name."""

import json
from typing import Any

import openai
import pytest

from engine.grammar.grammars import GrammarError
from loraplex.errors import ApiError
from loraplex.openai.grammar_checks import GrammarChecks
from loraplex.openai.schema_grammar import json_schema_grammar
from loraplex.openai.schema_recursion import endless_part
from tests.support.grammar_service import grammar_service

pytestmark = pytest.mark.anyio

SELF: Any = {"$ref": "#"}
NODE: Any = {"$ref": "#/$defs/node"}


def node(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": NODE}, **fields}


ENDLESS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "itself": (SELF, ()),
    "all of itself": ({"allOf": [SELF]}, ()),
    "any of itself": ({"anyOf": [SELF]}, ()),
    "required": ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, ()),
    "one another": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        (),
    ),
    "items": ({"type": "array", "items": SELF, "minItems": 1}, ()),
    "first item": ({"type": "array", "prefixItems": [SELF], "minItems": 1}, ()),
    "any property": (
        {"type": "object", "additionalProperties": SELF, "minProperties": 1}, (),
    ),
    "a required one that is not listed": (
        {"type": "object", "additionalProperties": SELF, "required": ["a"]}, (),
    ),
    "object or array": (
        {
            "type": ["object", "array"], "properties": {"a": SELF}, "required": ["a"],
            "items": SELF, "minItems": 1,
        },
        (),
    ),
    "an optional part": (
        {"type": "object", "properties": {"x": NODE}, "$defs": {"node": node(required=["next"])}},
        ("properties", "x"),
    ),
    "one branch of two": (
        {"anyOf": [{"type": "null"}, NODE], "$defs": {"node": node(required=["next"])}},
        ("anyOf", "1"),
    ),
    "escaped names": (
        {"type": "object", "properties": {"a/b~": {"$ref": "#/properties/a~1b~0"}}},
        ("properties", "a/b~"),
    ),
}  # fmt: skip

FINITE: dict[str, dict[str, Any]] = {
    "optional": {"type": "object", "properties": {"a": SELF}},
    "nullable": {
        "type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"],
    },
    "a branch": {
        "anyOf": [
            {"type": "null"}, {"type": "object", "properties": {"n": SELF}, "required": ["n"]},
        ],
    },
    "left recursion": {"anyOf": [SELF, {"type": "string"}]},
    "an empty list": {"type": "array", "items": SELF},
    "a tree": {
        "type": "object", "required": ["children"],
        "properties": {"children": {"type": "array", "items": SELF}},
    },
    "items after the first": {
        "type": "array", "prefixItems": [{"const": 1}], "minItems": 1, "items": SELF,
    },
    "not reached": {"type": "string", "$defs": {"node": node(required=["next"])}},
    "an object or an array": {
        "type": ["object", "array"], "properties": {"a": SELF}, "required": ["a"], "items": SELF,
    },
    "some property": {
        "type": "object", "minProperties": 1,
        "properties": {"a": SELF, "b": {"type": "null"}}, "additionalProperties": False,
    },
    "no such part": {"$ref": "#/$defs/none"},
    "elsewhere": {"$ref": "https://example.org/schema"},
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_part_that_always_contains_itself_is_found(name):
    schema, steps = ENDLESS[name]
    assert endless_part(schema) == steps


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_with_a_way_out_is_none(name):
    assert endless_part(FINITE[name]) is None


def test_a_long_chain_takes_no_longer_than_its_length():
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2500)}
    chain = {"$ref": "#/$defs/d0", "$defs": {**links, "d2500": {"type": "string"}}}
    assert endless_part(chain) is None
    chain["$defs"]["d2500"] = {"$ref": "#/$defs/d0"}
    assert endless_part(chain) == ()


@pytest.mark.parametrize("name", ENDLESS)
async def test_an_endless_schema_is_refused_with_its_field(name):
    schema, steps = ENDLESS[name]
    with pytest.raises(ApiError) as refused:
        await GrammarChecks().check("acme", json_schema_grammar(schema), {"schema": schema})
    assert (refused.value.status, refused.value.code) == (400, "endless_schema")
    path = "schema" + "".join(f"[{s}]" if s.isdigit() else f".{s}" for s in steps)
    assert refused.value.param == path and path in refused.value.message


async def test_over_http_a_recursive_schema_is_served_or_a_400_of_its_field(tmp_path):
    tree: Any = {
        "type": "object", "required": ["name", "parts"], "additionalProperties": False,
        "properties": {
            "name": {"enum": ["a", "b"]}, "parts": {"type": "array", "items": SELF, "maxItems": 1},
        },
    }  # fmt: skip
    messages: Any = [{"role": "user", "content": "Draw."}]
    async with grammar_service(tmp_path) as service, service.openai() as client:

        def ask(schema: Any) -> Any:
            named = {"name": "tree", "schema": schema}
            return client.chat.completions.create(
                model="base", messages=messages, max_tokens=1200, seed=1,
                response_format={"type": "json_schema", "json_schema": named},
            )  # fmt: skip

        reply = await ask(tree)
        assert json.loads(reply.choices[0].message.content)["name"] in ("a", "b")
        for schema, _ in ENDLESS.values():
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(schema)
            assert refused.value.code == "endless_schema"
            assert str(refused.value.param).startswith("response_format.json_schema.schema")
        tool: Any = {
            "type": "function", "function": {"name": "f", "parameters": ENDLESS["required"][0]},
        }  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="base", messages=messages, tools=[tool], tool_choice="required"
            )
        assert refused.value.param == "tools[0].function.parameters"


async def test_a_grammar_that_the_engine_cannot_follow_is_a_400_without_its_words(tmp_path):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        messages: Any = [{"role": "user", "content": "Say."}]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.grammar.grammars.Grammars._mask", _fails)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="base", messages=messages, response_format={"type": "json_object"}
                )
        assert (refused.value.code, refused.value.param) == (
            "schema_too_complex",
            "response_format",
        )
        assert "lexer" not in refused.value.message


def _fails(*_: object) -> None:
    raise GrammarError("lexer: too many items")
