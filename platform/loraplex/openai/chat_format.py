"""Chat completions as bytes. All that does not change from token to token is encoded once."""

from collections.abc import Sequence

import msgspec

from engine.text.tokenizer import Tokenizer
from loraplex.openai.call import Call
from loraplex.openai.generation import Piece
from loraplex.openai.logprobs import TokenName, chat_logprobs
from loraplex.openai.replies import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ReplyMessage,
    Timing,
    Usage,
)
from loraplex.openai.reply_format import chunk_head, chunk_tail, usage_tail


class ChatFormat:
    """`ReplyFormat` of `/v1/chat/completions`."""

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, fingerprint: str, logprobs: bool,
        name: TokenName, null_usage: bool = False,
    ) -> None:  # fmt: skip
        self._call = call
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._has_logprobs = logprobs
        self._name = name
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
        events = b""
        if piece.text or piece.logprobs:
            events = (
                b'%b[{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}]}\n\n'
                % (
                    self._head,
                    piece.choice_index,
                    msgspec.json.encode(piece.text),
                    self._logprobs(piece),
                )
            )
        if piece.finish_reason is not None:
            events += b'%b[{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}]%b' % (
                self._head, piece.choice_index, piece.finish_reason.encode(), chunk_tail(timing),
            )  # fmt: skip
        return events

    def usage_event(self, usage: Usage, timing: Timing) -> bytes:
        """The event without choices."""
        head = self._head.replace(b'"usage":null,', b"", 1)
        return head + usage_tail(usage, timing)

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The `chat.completion` object."""
        choices = [
            ChatChoice(
                index=index,
                message=ReplyMessage("".join(piece.text for piece in parts)),
                finish_reason=parts[-1].finish_reason or "stop",
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

    def _logprobs(self, piece: Piece) -> bytes:
        if not self._has_logprobs:
            return b"null"
        return msgspec.json.encode(
            ChatLogprobs(chat_logprobs(self._tokenizer, self._name, piece.logprobs))
        )
