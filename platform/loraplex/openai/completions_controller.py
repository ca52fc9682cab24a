"""`POST /v1/completions`."""

from typing import Any

from litestar import Controller, post
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from adapter_store.registry.records import TenantInfo
from loraplex.auth import Caller, requires_inference_scope
from loraplex.openai.call import admit_call, open_call
from loraplex.openai.completion_format import CompletionFormat
from loraplex.openai.constraints import reply_grammar
from loraplex.openai.deadline import REQUEST_HEADERS, read_deadline
from loraplex.openai.logprobs import token_name
from loraplex.openai.prompts import completion_prompts
from loraplex.openai.replies import Completion
from loraplex.openai.reply import includes_usage, send_reply
from loraplex.openai.requests import CompletionRequest, read_completion_request
from loraplex.openai.resolve import resolve_target, routing_key
from loraplex.openai.sampling import check_against_engine, sampling_params
from loraplex.openai.version_defaults import with_defaults
from loraplex.openapi import generation_responses, json_body, operation
from loraplex.services import Services


class CompletionsController(Controller):
    """Text completion, streamed or whole."""

    path = "/v1/completions"
    guards = (requires_inference_scope,)
    tags = ("inference",)

    @post(
        operation_id=operation("createCompletion"),
        operation_class=json_body(CompletionRequest, headers=REQUEST_HEADERS),
        responses=generation_responses(Completion),
        status_code=200,
    )
    async def create(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> ASGIResponse:
        """Continue one or more prompts with a model of the tenant."""
        limits = services.settings.requests
        async with read_deadline(request, limits) as deadline:
            completion = await read_completion_request(request, limits)
            key = routing_key(completion, request.scope)
            target = await resolve_target(services, tenant, completion.model, key)
            admission = await admit_call(services, tenant, target)
            info = services.backends.engine.info
            tokenizer = services.backends.tokenizer
            completion = with_defaults(completion, target, tokenizer)
            turn = services.tokenising.of(tenant.name)
            prompts = await completion_prompts(tokenizer, completion, info, limits, turn)
            check_against_engine(completion, info, len(prompts), limits.max_choices)
            grammar = await reply_grammar(tenant.name, completion, services.grammars, limits)
            sampling = [
                sampling_params(
                    completion,
                    max_tokens=completion.max_tokens,
                    logprobs=completion.logprobs,
                    num_prompt_tokens=len(prompt),
                    max_model_len=info.max_model_len,
                    grammar=grammar,
                )
                for prompt in prompts
            ]
            call = await open_call(
                services, tenant, target, admission, completion, prompts, sampling, "cmpl",
                deadline,
            )  # fmt: skip
        reply = CompletionFormat(
            call,
            tokenizer,
            fingerprint=services.system_fingerprint,
            logprobs=completion.logprobs is not None,
            name=token_name(tokenizer, as_ids=bool(completion.return_tokens_as_token_ids)),
            null_usage=includes_usage(completion),
        )
        return await send_reply(request, services, call, completion, reply)
