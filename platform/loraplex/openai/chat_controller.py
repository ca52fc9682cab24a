"""`POST /v1/chat/completions`."""

from typing import Any

from litestar import Controller, post
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from adapter_store.registry.records import TenantInfo
from loraplex.auth import Caller, requires_inference_scope
from loraplex.openai.call import admit_call, open_call
from loraplex.openai.chat_format import ChatFormat
from loraplex.openai.constraints import chat_grammar, offered_tools
from loraplex.openai.deadline import REQUEST_HEADERS, read_deadline
from loraplex.openai.logprobs import token_name
from loraplex.openai.prompts import chat_prompt
from loraplex.openai.replies import ChatCompletion
from loraplex.openai.reply import includes_usage, send_reply
from loraplex.openai.requests import ChatRequest, read_chat_request
from loraplex.openai.resolve import resolve_target, routing_key
from loraplex.openai.sampling import check_against_engine, sampling_params
from loraplex.openai.version_defaults import template_of, with_defaults
from loraplex.openapi import generation_responses, json_body, operation
from loraplex.services import Services


class ChatController(Controller):
    """Chat, streamed or whole."""

    path = "/v1/chat/completions"
    guards = (requires_inference_scope,)
    tags = ("inference",)

    @post(
        operation_id=operation("createChatCompletion"),
        operation_class=json_body(ChatRequest, headers=REQUEST_HEADERS),
        responses=generation_responses(ChatCompletion),
        status_code=200,
    )
    async def create(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> ASGIResponse:
        """Answer a conversation with a model of the tenant."""
        limits = services.settings.requests
        async with read_deadline(request, limits) as deadline:
            chat = await read_chat_request(request, limits)
            key = routing_key(chat, request.scope)
            target = await resolve_target(services, tenant, chat.model, key)
            admission = await admit_call(services, tenant, target)
            info = services.backends.engine.info
            check_against_engine(chat, info, 1, limits.max_choices)
            tokenizer = services.backends.tokenizer
            chat = with_defaults(chat, target, tokenizer)
            template = template_of(services, tenant.name, target)
            tools = offered_tools(chat, template or tokenizer)
            grammar = await chat_grammar(tenant.name, chat, tools, services.grammars, limits)
            turn = services.tokenising.of(tenant.name)
            prompt = await chat_prompt(tokenizer, chat, info, limits, tools, template, turn)
            is_newer = chat.max_completion_tokens is not None
            sampling = sampling_params(
                chat,
                max_tokens=chat.max_completion_tokens if is_newer else chat.max_tokens,
                max_tokens_field="max_completion_tokens" if is_newer else "max_tokens",
                logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
                num_prompt_tokens=len(prompt),
                max_model_len=info.max_model_len,
                grammar=grammar,
            )
            call = await open_call(
                services, tenant, target, admission, chat, [prompt], [sampling], "chatcmpl",
                deadline,
            )  # fmt: skip
        reply = ChatFormat(
            call,
            tokenizer,
            fingerprint=services.system_fingerprint,
            logprobs=bool(chat.logprobs),
            name=token_name(tokenizer, as_ids=bool(chat.return_tokens_as_token_ids)),
            null_usage=includes_usage(chat),
            tool_names=[tool.function.name for tool in tools],
        )
        return await send_reply(request, services, call, chat, reply)
