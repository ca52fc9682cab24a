"""The bodies of the two generation endpoints."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar.connection import Request
from msgspec import Meta

from loraplex.errors import InvalidRequest, UnsupportedField
from loraplex.json_body import decode, decode_object, read_body
from loraplex.openai.fields import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    GenerationFields,
    refuse_unsupported,
)
from loraplex.openai.tools import Tool, ToolCall, ToolChoice, check_tools
from loraplex.settings import RequestLimits


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """The only kind of content part; images, audio and files are refused."""

    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation. `developer` is OpenAI's newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    """Of the call that a tool's message answers."""
    function_call: msgspec.Raw | None = None

    @property
    def text(self) -> str:
        """The content; parts are joined by line breaks, as vLLM does."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """None: up to the context's end, as is anything beyond it."""
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """OpenAI's newer name of `max_tokens`; it wins."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """None is `auto` where there are tools."""
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    """OpenAI's default is 16; null means up to the context's end, as is anything beyond it."""
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool | None = None


async def read_chat_request(request: Request[Any, Any, Any], limits: RequestLimits) -> ChatRequest:
    """Read and check a chat call; raises `InvalidRequest` and its kin."""
    body = await read_body(request, limits)
    refuse_unsupported(decode_object(body, limits), UNSUPPORTED_CHAT)
    chat = decode(body, ChatRequest)
    _check_common(chat, limits)
    check_messages(chat.messages, limits)
    check_tools(chat.tools or (), chat.tool_choice, limits)
    if chat.top_logprobs is not None:
        if chat.top_logprobs > 0 and not chat.logprobs:
            raise InvalidRequest("top_logprobs", "`top_logprobs` needs `logprobs: true`")
        _check_logprobs("top_logprobs", chat.top_logprobs, limits)
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt",
            "`add_generation_prompt` and `continue_final_message` exclude each other",
        )
    return chat


def check_messages(messages: Sequence[Message], limits: RequestLimits) -> None:
    """Raise `InvalidRequest` for a conversation that cannot be one."""
    if len(messages) > limits.max_messages:
        raise InvalidRequest(
            "messages", f"`messages` may have {limits.max_messages} entries at most"
        )
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


async def read_completion_request(
    request: Request[Any, Any, Any], limits: RequestLimits
) -> CompletionRequest:
    """Read and check a completion call; raises `InvalidRequest` and its kin."""
    body = await read_body(request, limits)
    refuse_unsupported(decode_object(body, limits), UNSUPPORTED_COMPLETION)
    completion = decode(body, CompletionRequest)
    _check_common(completion, limits)
    if completion.logprobs is not None:
        _check_logprobs("logprobs", completion.logprobs, limits)
    if completion.best_of is not None and completion.best_of != (completion.n or 1):
        raise UnsupportedField("best_of", "leave it out, or set it to `n`")
    return completion


def _check_common(fields: GenerationFields, limits: RequestLimits) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options", "`stream_options` needs `stream: true`")
    sizes: Mapping[str, tuple[int, int]] = {
        "logit_bias": (len(fields.logit_bias or ()), limits.max_logit_bias),
        "stop": (len(stop_strings(fields)), limits.max_stop),
        "stop_token_ids": (len(fields.stop_token_ids or ()), limits.max_stop_token_ids),
    }
    for name, (size, limit) in sizes.items():
        if size > limit:
            raise InvalidRequest(name, f"`{name}` may have {limit} entries at most, not {size}")
    if fields.stop == "":
        raise InvalidRequest("stop", "`stop` must not be empty")
    if any(len(stop) > limits.max_stop_chars for stop in stop_strings(fields)):
        raise InvalidRequest("stop", f"`stop` may have {limits.max_stop_chars} characters at most")


def stop_strings(fields: GenerationFields) -> list[str]:
    """Return the stop strings, however they were given."""
    return [fields.stop] if isinstance(fields.stop, str) else list(fields.stop or ())


def _check_logprobs(name: str, value: int, limits: RequestLimits) -> None:
    if value > limits.max_logprobs:
        raise InvalidRequest(name, f"`{name}` may be {limits.max_logprobs} at most, not {value}")


def _check_message(message: Message, path: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"{path}.tool_calls", f"`{path}.tool_calls`: only the assistant calls tools"
        )
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"{path}.tool_call_id", f"`{path}.tool_call_id` is missing", code="missing_field"
        )
    if message.function_call is not None and bytes(message.function_call) != b"null":
        raise UnsupportedField(f"{path}.function_call")
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(
            f"{path}.content", f"`{path}.content` is missing", code="missing_field"
        )
