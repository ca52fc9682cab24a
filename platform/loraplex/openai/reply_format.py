"""What a reply looks like, to the code that sends it: one format an endpoint."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from loraplex.openai.generation import Piece
from loraplex.openai.replies import Timing, Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class ReplyFormat(Protocol):
    """Bytes of one call's reply. Events are whole: `data: …` and an empty line."""

    def opening(self, num_choices: int) -> bytes:
        """Events before the first token."""
        ...

    def event(self, piece: Piece, timing: Timing | None = None) -> bytes:
        """Events of a piece; `timing` goes with the last one of the stream."""
        ...

    def usage_event(self, usage: Usage, timing: Timing) -> bytes:
        """The event of `stream_options.include_usage`, with no choices."""
        ...

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The body of a reply that is not streamed; the pieces of each choice, in order."""
        ...


def chunk_head(
    *, call_id: str, kind: str, created: int, model: str, fingerprint: str, null_usage: bool
) -> bytes:
    """Return what every event of a stream begins with, up to `"choices":`."""
    fields = msgspec.json.encode(
        {
            "id": call_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
    )
    return b"data: " + fields[:-1] + (b',"usage":null' if null_usage else b"") + b',"choices":'


def usage_event(head: bytes, usage: Usage, timing: Timing) -> bytes:
    """Return the event without choices, of a stream whose others begin with `head`."""
    return b'%b[],"usage":%b,"loraplex":%b}\n\n' % (
        head.replace(b'"usage":null,', b"", 1),
        msgspec.json.encode(usage),
        msgspec.json.encode(timing),
    )


def chunk_tail(timing: Timing | None) -> bytes:
    """Return the end of an event, after its choices."""
    if timing is None:
        return b"}\n\n"
    return b',"loraplex":%b}\n\n' % msgspec.json.encode(timing)
