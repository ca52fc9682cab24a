"""What a reply is held to: the JSON of a schema, or calls of the given functions."""

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer
from loraplex.errors import InvalidRequest
from loraplex.openai.fields import GenerationFields
from loraplex.openai.grammar_checks import GrammarChecks
from loraplex.openai.requests import ChatRequest
from loraplex.openai.response_format import JsonObjectFormat, JsonSchemaFormat, response_grammar
from loraplex.openai.tools import CALL_OPENS, Tool, calls_grammar, has_to_call
from loraplex.openai.version_defaults import VersionTemplate
from loraplex.settings import RequestLimits


def offered_tools(chat: ChatRequest, tokenizer: Tokenizer | VersionTemplate) -> Sequence[Tool]:
    """Return the tools that the model is told of; raises `InvalidRequest` if it cannot be."""
    has_history = any(m.role == "tool" or m.tool_calls for m in chat.messages)
    tools = () if chat.tool_choice == "none" else chat.tools or ()
    if (tools or has_history) and tokenizer.has_chat_template and not tokenizer.takes_tools:
        raise InvalidRequest(
            "tools" if tools else "messages",
            "this model's chat template has no place for tools and their calls",
            code="tools_not_supported",
        )
    if tools and not has_to_call(chat.tool_choice) and not tokenizer.template_has(CALL_OPENS):
        raise InvalidRequest(
            "tool_choice",
            f"this model's chat template does not teach calls in {CALL_OPENS} tags, which are what "
            'is understood here: set `tool_choice` to "required", "none" or a function',
            code="tool_choice_not_supported",
        )
    return tools


async def chat_grammar(
    tenant: str,
    chat: ChatRequest,
    tools: Sequence[Tool],
    checks: GrammarChecks,
    limits: RequestLimits,
) -> str | None:
    """Return what a chat's replies are held to; raises `InvalidRequest`. None for free text."""
    if not tools:
        return await reply_grammar(tenant, chat, checks, limits)
    if isinstance(chat.response_format, JsonObjectFormat | JsonSchemaFormat):
        raise InvalidRequest(
            "response_format",
            '`response_format` needs `tool_choice: "none"`: a reply in it could not be a call',
            code="conflicting_fields",
        )
    if not has_to_call(chat.tool_choice):
        return None
    parallel = chat.parallel_tool_calls is not False
    grammar, schemas = calls_grammar(tools, chat.tool_choice, parallel=parallel)
    await checks.check(tenant, grammar, schemas)
    return grammar


async def reply_grammar(
    tenant: str, fields: GenerationFields, checks: GrammarChecks, limits: RequestLimits
) -> str | None:
    """Return what `response_format` holds replies to; raises `InvalidRequest`."""
    found = response_grammar(fields.response_format, limits)
    if found is None:
        return None
    await checks.check(tenant, *found)
    return found[0]
