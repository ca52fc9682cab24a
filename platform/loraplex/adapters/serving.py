"""How a version wants to be served: the parts of an upload that say it, checked."""

from typing import Any

import msgspec

from adapter_store.json_words import in_json_words
from adapter_store.registry.records import ServingDefaults
from engine.text.errors import ChatTemplateError
from loraplex.adapters.upload import Upload
from loraplex.errors import InvalidRequest
from loraplex.openai.requests import CompletionRequest
from loraplex.services import Services

SAMPLING_FIELDS = (
    "frequency_penalty", "min_p", "presence_penalty", "repetition_penalty",
    "temperature", "top_k", "top_p",
)  # fmt: skip
MAX_STOP_TOKENS = 16


async def read_serving(services: Services, tenant: str, upload: Upload) -> ServingDefaults:
    """Return what the parts say; raises `InvalidRequest` that names the part at fault."""
    return await serving_of(
        services, tenant, upload.chat_template, upload.stop_tokens, upload.defaults
    )


async def serving_of(
    services: Services,
    tenant: str,
    chat_template: str | None,
    stop_tokens: str | None,
    defaults: str | None,
) -> ServingDefaults:
    """As `read_serving`; stop tokens and defaults are JSON."""
    source, takes_tools = chat_template, False
    if source is not None:
        try:
            takes_tools = await services.templates.takes_tools(tenant, source)
        except ChatTemplateError as error:
            raise InvalidRequest("chat_template", error.message, code=error.code) from None
    return ServingDefaults(
        chat_template=source,
        takes_tools=takes_tools,
        stop_tokens=_stop_tokens(services, stop_tokens),
        sampling=_sampling(defaults),
    )


def _stop_tokens(services: Services, raw: str | None) -> tuple[str, ...]:
    if raw is None:
        return ()
    try:
        tokens = msgspec.json.decode(raw, type=list[str])
    except msgspec.DecodeError:
        raise InvalidRequest("stop_tokens", "`stop_tokens` must be a JSON list of texts") from None
    if len(tokens) > MAX_STOP_TOKENS:
        raise InvalidRequest("stop_tokens", f"`stop_tokens` may name {MAX_STOP_TOKENS} at most")
    for token in tokens:
        if services.backends.tokenizer.token_id(token) is None:
            raise InvalidRequest(
                "stop_tokens", f"`stop_tokens`: {token[:64]!r} is no token of the model"
            )
    return tuple(dict.fromkeys(tokens))


def _sampling(raw: str | None) -> dict[str, int | float]:
    if raw is None:
        return {}
    try:
        values = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("defaults", "`defaults` must be a JSON object") from None
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if name not in SAMPLING_FIELDS:
            raise InvalidRequest(
                "defaults", f"`defaults` may hold {', '.join(SAMPLING_FIELDS)}, not {name[:64]!r}"
            )
    try:  # the ranges are those of requests
        msgspec.convert({"model": "", "prompt": "", **given}, CompletionRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest("defaults", f"`defaults`: {in_json_words(str(error))}") from None
    return given
