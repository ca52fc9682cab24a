"""`/tokenize`, `/detokenize` and `/version`, as vLLM has them."""

from typing import Annotated, Any

import msgspec
from litestar import Controller, get, post
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.response import Response
from msgspec import Meta

from adapter_store.registry.records import TenantInfo
from engine.messages import EngineInfo
from engine.text.tokenizer import Tokenizer
from loraplex.auth import Caller, requires_any_tenant_scope, requires_inference_scope
from loraplex.errors import InvalidRequest
from loraplex.json_body import read_struct
from loraplex.openai.constraints import offered_tools
from loraplex.openai.prompts import Turn, chat_prompt, completion_prompts
from loraplex.openai.requests import ChatRequest, CompletionRequest, Message, check_messages
from loraplex.openai.resolve import resolve_target
from loraplex.openai.sampling import check_token_ids
from loraplex.openai.tools import Tool, check_tools
from loraplex.openai.version_defaults import VersionTemplate, template_of
from loraplex.openapi import OpenAIError, errors, json_body, operation
from loraplex.services import Services
from loraplex.settings import RequestLimits
from loraplex.version import service_version

_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 503)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct, frozen=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class DetokenizeReply(msgspec.Struct, frozen=True):
    """Their text, special tokens shown."""

    prompt: str


class VersionReply(msgspec.Struct, frozen=True):
    """Of this service."""

    version: str


class TokenizeController(Controller):
    """The base model's tokenizer, which all adapters share."""

    path = "/"
    tags = ("inference",)

    @post(
        "/tokenize",
        operation_id=operation("tokenize"),
        operation_class=json_body(TokenizeRequest),
        guards=(requires_inference_scope,),
        responses={**_ERRORS, **errors(OpenAIError, 429)},
        status_code=200,
    )
    async def tokenize(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> Response[TokenizeReply]:
        """Count the tokens of a prompt as a request with it would."""
        rates = await services.limiter.admit_aside(tenant)
        limits = services.settings.requests
        asked = await read_struct(request, TokenizeRequest, limits)
        model = services.model_name if asked.model is None else asked.model
        target = await resolve_target(services, tenant, model)
        template = template_of(services, tenant.name, target)
        tokenizer, info = services.backends.tokenizer, services.backends.engine.info
        turn = services.tokenising.of(tenant.name)
        tokens = await _tokens(tokenizer, asked, model, info, limits, template, turn)
        texts = list(map(tokenizer.token_text, tokens)) if asked.return_token_strs else None
        reply = TokenizeReply(len(tokens), info.max_model_len, tokens, texts)
        return Response(reply, headers=rates)

    @post(
        "/detokenize",
        operation_id=operation("detokenize"),
        operation_class=json_body(DetokenizeRequest),
        guards=(requires_inference_scope,),
        responses={**_ERRORS, **errors(OpenAIError, 429)},
        status_code=200,
    )
    async def detokenize(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> Response[DetokenizeReply]:
        """Turn token ids into text."""
        rates = await services.limiter.admit_aside(tenant)
        asked = await read_struct(request, DetokenizeRequest, services.settings.requests)
        info = services.backends.engine.info
        if asked.model is not None:
            await resolve_target(services, tenant, asked.model)
        if len(asked.tokens) > info.max_model_len:
            raise InvalidRequest(
                "tokens", f"`tokens` may have {info.max_model_len} entries at most, the context"
            )
        check_token_ids("tokens", asked.tokens, info.vocab_size)
        text = services.backends.tokenizer.decode(asked.tokens, False)
        return Response(DetokenizeReply(text), headers=rates)

    @get(
        "/version",
        operation_id=operation("getVersion"),
        guards=(requires_any_tenant_scope,),
        responses=_ERRORS,
    )
    async def version(self, tenant: NamedDependency[TenantInfo]) -> VersionReply:
        """Say which version of the service answers."""
        return VersionReply(service_version())


async def _tokens(
    tokenizer: Tokenizer, asked: TokenizeRequest, model: str, info: EngineInfo,
    limits: RequestLimits, template: VersionTemplate | None, turn: Turn,
) -> list[int]:  # fmt: skip
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("prompt", "either `prompt` or `messages` is needed")
    if asked.messages is None:
        completion = CompletionRequest(
            model=model,
            prompt=asked.prompt or "",
            add_special_tokens=asked.add_special_tokens,
        )
        return (await completion_prompts(tokenizer, completion, info, limits, turn))[0]
    check_messages(asked.messages, limits)
    check_tools(asked.tools or (), None, limits)
    chat = ChatRequest(
        model=model,
        messages=asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=asked.chat_template_kwargs,
        tools=asked.tools,
    )
    tools = offered_tools(chat, template or tokenizer)
    return await chat_prompt(tokenizer, chat, info, limits, tools, template, turn)
