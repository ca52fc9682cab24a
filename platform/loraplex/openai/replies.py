"""The bodies of replies, as OpenAI's clients know them; msgspec encodes them."""

from typing import Literal

import msgspec

from engine.messages import RequestTiming
from loraplex.openai.tools import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a call, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timing(msgspec.Struct, frozen=True):
    """Where a call's time went, in milliseconds; of several prompts, the slowest one's."""

    adapter: str
    """`name@N`, or `base`."""
    queue_ms: float
    load_ms: float
    """The part of the queue time that waited for the adapter's weights."""
    prefill_ms: float
    decode_ms: float
    queue: dict[str, float]
    """The queue time by cause; sums to `queue_ms`."""

    def headers(self) -> dict[str, str]:
        """Return the `x-loraplex-*` headers of a reply that is not streamed."""
        return {
            "x-loraplex-adapter": self.adapter,
            "x-loraplex-queue-ms": f"{self.queue_ms:.3f}",
            "x-loraplex-queue": "; ".join(f"{cause}={ms:.3f}" for cause, ms in self.queue.items()),
            "x-loraplex-load-ms": f"{self.load_ms:.3f}",
            "x-loraplex-prefill-ms": f"{self.prefill_ms:.3f}",
            "x-loraplex-decode-ms": f"{self.decode_ms:.3f}",
        }


def timing_of(adapter: str, timing: RequestTiming) -> Timing:
    """Return an engine's timing as clients see it."""
    return Timing(
        adapter=adapter,
        queue_ms=_ms(timing.queue_seconds),
        load_ms=_ms(timing.queue.get("load", 0.0)),
        prefill_ms=_ms(timing.prefill),
        decode_ms=_ms(timing.decode),
        queue={cause: _ms(seconds) for cause, seconds in timing.queue.items()},
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that was drawn."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class ReplyMessage(msgspec.Struct, frozen=True):
    """What the model said."""

    content: str | None
    """None where it says nothing but calls."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One of `n` answers."""

    index: int
    message: ReplyMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion's tokens, side by side."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One of prompts x `n` answers."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
