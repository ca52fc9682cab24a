"""`tools` and `tool_choice`: functions that the model may call, or has to."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import llguidance
import msgspec
from msgspec import Meta

from loraplex.errors import InvalidRequest
from loraplex.openai.schema_grammar import check_schema, with_options
from loraplex.settings import RequestLimits

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
"""Around a call, as the templates of Hermes, Qwen and their like teach it."""

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function. `strict` or not, calls that are asked for are held to its parameters."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionChoice(msgspec.Struct, frozen=True):
    """The name of the function to call."""

    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Call this one."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(msgspec.Struct, frozen=True):
    """A call: `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a message of the assistant."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None, limits: RequestLimits) -> None:
    """Raise `InvalidRequest` for tools that contradict each other, or the choice."""
    if len(tools) > limits.max_tools:
        raise InvalidRequest("tools", f"`tools` may have {limits.max_tools} entries at most")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise InvalidRequest(
                f"tools[{index}].function.name", f"`tools` names `{tool.function.name}` twice"
            )
        names.add(tool.function.name)
        if tool.function.parameters is not None:
            field = f"tools[{index}].function.parameters"
            check_schema(tool.function.parameters, field, limits)
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            "tool_choice.function.name", "`tool_choice` names a function that `tools` has not"
        )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice", '`tool_choice: "required"` needs `tools`')


def has_to_call(choice: ToolChoice | None) -> bool:
    """Whether the reply is to be a call, whatever the model would say."""
    return choice == "required" or isinstance(choice, NamedToolChoice)


def calls_grammar(
    tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool
) -> tuple[str, dict[str, Any]]:
    """Return the grammar of one call or several, and the schemas in it by their field.

    A named function is called once; of `required`, at least one, and one only if not `parallel`.
    """
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    rules: list[str] = []
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        function = tool.function
        if named is None or function.name == named:
            schema = {"type": "object", **(function.parameters or {})}
            schemas[f"tools[{index}].function.parameters"] = schema
            opening = json.dumps(f'{{"name": "{function.name}", "arguments": ')
            rules.append(f'call{index}: {opening} %json {json.dumps(with_options(schema))} "}}"')
    names = " | ".join(rule.partition(":")[0] for rule in rules)
    opens, closes = json.dumps(CALL_OPENS + "\n"), json.dumps("\n" + CALL_CLOSES)
    more = r' ("\n" call)*' if named is None and parallel else ""
    lark = f"start: call{more}\ncall: {opens} ({names}) {closes}\n" + "\n".join(rules)
    return llguidance.LLMatcher.grammar_from_lark(lark), schemas
