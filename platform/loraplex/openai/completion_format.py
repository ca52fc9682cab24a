"""Text completions as bytes."""

from collections.abc import Sequence

import msgspec

from engine.text.tokenizer import Tokenizer
from loraplex.openai.call import Call
from loraplex.openai.generation import Piece
from loraplex.openai.logprobs import TokenName, completion_logprobs
from loraplex.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Timing,
    Usage,
)
from loraplex.openai.reply_format import chunk_head, chunk_tail, usage_event


class CompletionFormat:
    """`ReplyFormat` of `/v1/completions`."""

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, fingerprint: str, logprobs: bool,
        name: TokenName, null_usage: bool = False,
    ) -> None:  # fmt: skip
        self._call = call
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._has_logprobs = logprobs
        self._name = name
        self._offsets: dict[int, int] = {}
        """Characters of each choice that its log-probabilities have covered."""
        self._head = chunk_head(
            call_id=call.id,
            kind="text_completion",
            created=call.created,
            model=call.target.asked,
            fingerprint=fingerprint,
            null_usage=null_usage,
        )

    def opening(self, num_choices: int) -> bytes:
        """Nothing: a completion has no role."""
        return b""

    def event(self, piece: Piece, timing: Timing | None = None) -> bytes:
        """The text and, with the last one, the finish reason."""
        reason = b"null" if piece.finish_reason is None else b'"%b"' % piece.finish_reason.encode()
        return b'%b[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head,
            piece.choice_index,
            msgspec.json.encode(piece.text),
            msgspec.json.encode(self._logprobs(piece)) if self._has_logprobs else b"null",
            reason,
            chunk_tail(timing),
        )

    def usage_event(self, usage: Usage, timing: Timing) -> bytes:
        """The event without choices."""
        return usage_event(self._head, usage, timing)

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The `text_completion` object."""
        choices = [
            CompletionChoice(
                index=index,
                text="".join(piece.text for piece in parts),
                finish_reason=parts[-1].finish_reason or "stop",
                logprobs=self._logprobs(
                    Piece(index, "", [token for piece in parts for token in piece.logprobs], None)
                ),
            )
            for index, parts in enumerate(pieces)
        ]
        return msgspec.json.encode(
            Completion(
                id=self._call.id,
                created=self._call.created,
                model=self._call.target.asked,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
            )
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        offset = self._offsets.get(piece.choice_index, 0)
        found = completion_logprobs(self._tokenizer, self._name, piece.logprobs, offset)
        self._offsets[piece.choice_index] = offset + sum(
            len(self._tokenizer.token_text(token.token_id)) for token in piece.logprobs
        )
        return found
