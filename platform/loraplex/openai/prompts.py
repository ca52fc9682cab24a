"""Prompts as token ids. Long ones are tokenised off the event loop, one of a tenant at a time, and
those beyond all bounds not at all."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar, cast

import anyio.to_thread
import msgspec

from engine.engine_info import EngineInfo
from engine.text.errors import ChatTemplateError
from engine.text.tokenizer import Tokenizer
from loraplex.errors import ApiError, InvalidRequest
from loraplex.json_body import is_too_deep
from loraplex.openai.requests import ChatRequest, CompletionRequest, Message
from loraplex.openai.sampling import check_token_ids, context_length_exceeded
from loraplex.openai.tools import Tool, ToolCall
from loraplex.openai.version_defaults import VersionTemplate
from loraplex.settings import RequestLimits

T = TypeVar("T")
Turn = AbstractAsyncContextManager[None]
"""A tenant's turn of `Services.tokenising`, not entered yet."""

_INLINE_CHARS = 2_000
"""Up to this a prompt takes about a millisecond: less than a thread's round trip is worth."""
_MARKUP_CHARS = 32
"""Of one message, about."""


async def chat_prompt(
    tokenizer: Tokenizer,
    chat: ChatRequest,
    info: EngineInfo,
    limits: RequestLimits,
    tools: Sequence[Tool],
    template: VersionTemplate | None,
    turn: Turn,
) -> list[int]:
    """Render `template`, or the model's; raises `InvalidRequest` if it refuses the messages."""
    shown_tools = [template_tool(tool) for tool in tools] or None
    num_chars = sum(map(_num_chars, chat.messages)) + len(msgspec.json.encode(shown_tools))
    _check_chars(num_chars, info, limits)
    messages = [
        _as_template_message(message, f"messages[{index}]", limits.max_json_depth)
        for index, message in enumerate(chat.messages)
    ]
    continues = bool(chat.continue_final_message)
    add_generation_prompt = chat.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not continues

    options: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continues,
        "tools": shown_tools,
        "template_kwargs": chat.chat_template_kwargs or {},
    }

    def render() -> list[int]:
        return tokenizer.apply_chat_template(messages, **options)

    try:
        if template is not None:
            text = await template.render(messages, options)
            _check_chars(len(text), info, limits)
            encode = partial(tokenizer.encode, text, add_special_tokens=False)
            return await _run(encode, len(text), turn)
        # What a template adds to each message counts, and what it may show besides.
        size = num_chars + _MARKUP_CHARS * len(messages)
        size += len(msgspec.json.encode(options["template_kwargs"]))
        return await _run(render, size, turn)
    except ChatTemplateError as error:
        if error.code == "invalid_messages":
            raise InvalidRequest("messages", error.message, code=error.code) from None
        raise ApiError(400, error.code, error.message) from None


async def completion_prompts(
    tokenizer: Tokenizer,
    request: CompletionRequest,
    info: EngineInfo,
    limits: RequestLimits,
    turn: Turn,
) -> list[list[int]]:
    """Return each prompt's token ids, in order; raises `InvalidRequest`."""
    texts, token_ids = _split(request.prompt, info, limits)
    for text in texts:
        _check_chars(len(text), info, limits)
    for ids in token_ids:
        if len(ids) >= info.max_model_len:
            raise context_length_exceeded(len(ids), info.max_model_len)
        check_token_ids("prompt", ids, info.vocab_size)
    special = request.add_special_tokens is not False

    def encode() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=special) for text in texts]

    prompts = await _run(encode, sum(map(len, texts)), turn) if texts else token_ids
    if not all(prompts):
        raise InvalidRequest("prompt", "`prompt` must not be empty", code="empty_prompt")
    return prompts


def _num_chars(message: Message) -> int:
    calls = message.tool_calls or ()
    labels = len(message.name or "") + len(message.tool_call_id or "")
    return (
        len(message.text)
        + labels
        + sum(
            len(call.id) + len(call.function.name) + len(call.function.arguments) for call in calls
        )
    )


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates show it."""
    function: dict[str, Any] = msgspec.to_builtins(tool.function)
    function.pop("strict", None)
    return {"type": "function", "function": function}


def _as_template_message(message: Message, path: str, max_depth: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["tool_calls"] = [
            _as_template_call(call, f"{path}.tool_calls[{index}]", max_depth)
            for index, call in enumerate(message.tool_calls)
        ]
    return shown


def _as_template_call(call: ToolCall, path: str, max_depth: int) -> dict[str, Any]:
    # Templates print arguments as JSON, so they are given what the text stands for.
    field = f"{path}.function.arguments"
    text = call.function.arguments
    if is_too_deep(text.encode(), max_depth):
        raise InvalidRequest(
            field,
            f"`{field}` may be nested {max_depth} levels deep at most",
            code="json_too_deep",
        )
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        raise InvalidRequest(field, f"`{field}` must be a JSON object, as text") from None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _split(
    prompt: str | list[str | int | list[int]], info: EngineInfo, limits: RequestLimits
) -> tuple[list[str], list[list[int]]]:
    """Return the texts and the lists of ids; one of both is empty. Looks at sizes first."""
    if isinstance(prompt, str):
        return [prompt], []
    if not prompt:
        raise InvalidRequest("prompt", "`prompt` must not be empty", code="empty_prompt")
    kind = type(prompt[0])
    if kind is int and len(prompt) >= info.max_model_len:
        raise context_length_exceeded(len(prompt), info.max_model_len)
    if kind is not int and len(prompt) > limits.max_prompts:
        raise InvalidRequest("prompt", f"`prompt` may have {limits.max_prompts} entries at most")
    if any(type(entry) is not kind for entry in prompt):
        raise InvalidRequest("prompt", "`prompt` mixes texts, token ids and lists")
    if kind is str:
        return cast(list[str], prompt), []
    if kind is int:
        return [], [cast(list[int], prompt)]
    return [], cast(list[list[int]], prompt)


def _check_chars(num_chars: int, info: EngineInfo, limits: RequestLimits) -> None:
    if num_chars > info.max_model_len * limits.max_chars_per_token:
        raise context_length_exceeded(None, info.max_model_len)


async def _run(work: Callable[[], T], num_chars: int, turn: Turn) -> T:
    if num_chars <= _INLINE_CHARS:
        return work()
    async with turn:
        return await anyio.to_thread.run_sync(work)
