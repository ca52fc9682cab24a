"""What a client may ask for: the fields that both endpoints share, and those we refuse by name.

Fields that nobody here knows are ignored, as OpenAI's own clients expect of a server; so are
`store`, `metadata`, `service_tier`, `prediction`, `safety_identifier` and their like, which do not
change the answer. A field that would change it, and that is not supported, is refused unless its
value says what we do anyway.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loraplex.errors import UnsupportedField
from loraplex.openai.response_format import ResponseFormat

Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream ends."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's fields, and vLLM's where OpenAI has none. None always means the default."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[Annotated[str, Meta(min_length=1)]] | None = None

    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 mean off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities call tokens `token_id:N` in place of their text."""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """Narrows the prefix cache further than to the tenant."""
    user: str | None = None
    prompt_cache_key: str | None = None
    """These two say whose request it is: one of them gets the same version of a canary always."""


_VLLM: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_VLLM,
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Name → values that are accepted, beside null, because they ask for nothing."""
UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_VLLM,
    "echo": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}

_HINTS = {
    "functions": 'use `tools`, or set `function_call` to "none"',
}
_SWITCHES = {"functions": "function_call"}


def refuse_unsupported(
    fields: Mapping[str, msgspec.Raw], unsupported: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise `UnsupportedField` for the first field whose value would change the answer."""
    for name, raw in fields.items():
        accepted = unsupported.get(name)
        if accepted is None:
            continue
        value = msgspec.json.decode(raw)
        if value is None or any(value == one and type(value) is type(one) for one in accepted):
            continue
        switch = fields.get(_SWITCHES.get(name, ""))
        if switch is not None and msgspec.json.decode(switch) == "none":
            continue
        raise UnsupportedField(name, _HINTS.get(name, "leave it out"))
