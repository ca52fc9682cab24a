"""Chat completions as bytes. All that does not change from token to token is encoded once."""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.text.tokenizer import Tokenizer
from loraplex.openai.call import Call
from loraplex.openai.generation import Piece
from loraplex.openai.logprobs import TokenName, chat_logprobs
from loraplex.openai.replies import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    FinishReason,
    ReplyMessage,
    Timing,
    Usage,
)
from loraplex.openai.reply_format import chunk_head, chunk_tail, usage_event
from loraplex.openai.tool_calls import ToolCallParser


class ChatFormat:
    """`ReplyFormat` of `/v1/chat/completions`."""

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, fingerprint: str, logprobs: bool,
        name: TokenName, null_usage: bool = False, tool_names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """With `tool_names`, calls of these are looked for in what the model says."""
        self._call = call
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._has_logprobs = logprobs
        self._name = name
        choices = call.generation.choices if tool_names else ()
        self._parsers = [ToolCallParser(tool_names) for _ in choices]
        self._head = chunk_head(
            call_id=call.id,
            kind="chat.completion.chunk",
            created=call.created,
            model=call.target.asked,
            fingerprint=fingerprint,
            null_usage=null_usage,
        )

    def opening(self, num_choices: int) -> bytes:
        """One event for each choice: who speaks."""
        return b"".join(
            b'%b[{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}]}\n\n' % (self._head, index)
            for index in range(num_choices)
        )

    def event(self, piece: Piece, timing: Timing | None = None) -> bytes:
        """The text, then the end: two events if a piece has both, as OpenAI sends them."""
        events, finish_reason = b"", piece.finish_reason
        if self._parsers:
            events, finish_reason = self._delta_with_calls(piece)
        elif piece.text or piece.logprobs:
            events = self._delta(piece, b'{"content":%b}' % msgspec.json.encode(piece.text))
        if finish_reason is not None:
            events += b'%b[{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}]%b' % (
                self._head, piece.choice_index, finish_reason.encode(), chunk_tail(timing),
            )  # fmt: skip
        return events

    def _delta(self, piece: Piece, delta: bytes) -> bytes:
        return b'%b[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}]}\n\n' % (
            self._head, piece.choice_index, delta, self._logprobs(piece),
        )  # fmt: skip

    def _delta_with_calls(self, piece: Piece) -> tuple[bytes, FinishReason | None]:
        parser = self._parsers[piece.choice_index]
        first = parser.num_calls
        parsed = parser.push(piece.text, is_last=piece.finish_reason is not None)
        delta: dict[str, Any] = {}
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.calls:
            delta["tool_calls"] = [
                {"index": first + place, **msgspec.to_builtins(call)}
                for place, call in enumerate(parsed.calls)
            ]
        events = b""
        if delta or piece.logprobs:
            events = self._delta(piece, msgspec.json.encode(delta))
        return events, _finish_reason(piece.finish_reason, parser)

    def usage_event(self, usage: Usage, timing: Timing) -> bytes:
        """The event without choices."""
        return usage_event(self._head, usage, timing)

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The `chat.completion` object."""
        choices = [
            ChatChoice(
                index=index,
                message=self._message(index, "".join(piece.text for piece in parts)),
                finish_reason=self._whole_reason(index, parts[-1].finish_reason) or "stop",
                logprobs=ChatLogprobs(
                    chat_logprobs(
                        self._tokenizer,
                        self._name,
                        [token for piece in parts for token in piece.logprobs],
                    )
                )
                if self._has_logprobs
                else None,
            )
            for index, parts in enumerate(pieces)
        ]
        return msgspec.json.encode(
            ChatCompletion(
                id=self._call.id,
                created=self._call.created,
                model=self._call.target.asked,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
            )
        )

    def _message(self, index: int, text: str) -> ReplyMessage:
        if not self._parsers:
            return ReplyMessage(text)
        parsed = self._parsers[index].push(text, is_last=True)
        if not parsed.calls:
            return ReplyMessage(parsed.content)
        return ReplyMessage(parsed.content or None, tool_calls=parsed.calls)

    def _whole_reason(self, index: int, reason: FinishReason | None) -> FinishReason | None:
        return _finish_reason(reason, self._parsers[index]) if self._parsers else reason

    def _logprobs(self, piece: Piece) -> bytes:
        if not self._has_logprobs:
            return b"null"
        return msgspec.json.encode(
            ChatLogprobs(chat_logprobs(self._tokenizer, self._name, piece.logprobs))
        )


def _finish_reason(reason: FinishReason | None, parser: ToolCallParser) -> FinishReason | None:
    return "tool_calls" if reason == "stop" and parser.num_calls else reason
