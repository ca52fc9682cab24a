"""From what a client asked for to what the engine draws with: ranges that depend on the engine."""

import secrets
from collections.abc import Collection

from engine.engine_info import EngineInfo
from engine.errors import RequestRefused
from engine.sampling_params import SamplingParams
from loraplex.errors import InvalidRequest
from loraplex.openai.fields import GenerationFields


def check_against_engine(
    fields: GenerationFields, info: EngineInfo, num_prompts: int, max_choices: int
) -> None:
    """Raise `InvalidRequest` for ids out of the vocabulary and for too many choices."""
    n = fields.n or 1
    if n > info.max_num_seqs:
        raise InvalidRequest(
            "n",
            f"`n` may be {info.max_num_seqs} at most, the sequences that run at once",
            code="n_too_large",
        )
    if n * num_prompts > max_choices:
        raise InvalidRequest("n", f"prompts x `n` may be {max_choices} at most", code="n_too_large")
    for name, ids in (
        ("logit_bias", fields.logit_bias or ()),
        ("stop_token_ids", fields.stop_token_ids or ()),
    ):
        check_token_ids(name, ids, info.vocab_size)


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise `InvalidRequest` unless all ids are in the vocabulary."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                name,
                f"`{name}` has the token id {token_id}; ids go from 0 to {vocab_size - 1}",
                code="invalid_token_id",
            )


def sampling_params(
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    logprobs: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    grammar: str | None = None,
) -> SamplingParams:
    """Return the engine's parameters; raises `RequestRefused` for a prompt beyond the context.

    `max_tokens` is cut to what the context leaves; None takes all of that. `grammar` is what the
    reply is held to.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise context_length_exceeded(num_prompt_tokens, max_model_len)
    if fields.min_tokens and max_tokens is not None and fields.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", f"`min_tokens` must not be above `{max_tokens_field}`")
    if grammar is not None:
        for name, is_set in (("min_tokens", fields.min_tokens), ("ignore_eos", fields.ignore_eos)):
            if is_set:
                raise InvalidRequest(
                    name,
                    f"`{name}`: a reply that is held to a format ends where the format ends",
                    code="conflicting_fields",
                )
    limit = room if max_tokens is None else min(max_tokens, room)
    seed = secrets.randbits(63) if fields.seed is None else fields.seed & (2**63 - 1)
    return SamplingParams(
        max_tokens=limit,
        seed=seed,
        n=fields.n or 1,
        min_tokens=min(fields.min_tokens or 0, limit),
        temperature=_given(fields.temperature, 1.0),
        top_k=max(fields.top_k or 0, 0),
        top_p=_given(fields.top_p, 1.0),
        min_p=fields.min_p or 0.0,
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=dict(fields.logit_bias or {}),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        grammar=grammar,
    )


def context_length_exceeded(num_tokens: int | None, max_model_len: int) -> RequestRefused:
    """Return the refusal of a prompt that leaves no room for a token."""
    size = "more" if num_tokens is None else str(num_tokens)
    return RequestRefused(
        "context_length_exceeded",
        f"this model's context is {max_model_len} tokens, prompt and reply together; "
        f"the prompt has {size}",
        limit=max_model_len,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
