"""HTTP/1.1 connections with bounds that uvicorn's own protocol lacks.

A client without a key can cost no more than a connection: the head of a request is bounded in bytes
and in time, so are the requests that wait on a connection in number, and a reply that its reader
does not take is given up, with all that it holds.
"""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex.settings import ConnectionLimits

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*", re.IGNORECASE)
_END_OF_HEAD = b"\r\n\r\n"
_ONCE = frozenset((b"host", b"authorization"))
"""Fields whose repetition a proxy may read otherwise than we do; who calls may not depend on it."""
MAX_PIPELINED = 16
"""Requests that may wait on a connection for the reply before theirs. A single read can hold
thousands, and each of them takes a hundred times its bytes."""
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


def bounded_http(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Return the protocol for `uvicorn.Config(http=…)`."""
    return cast(type[asyncio.Protocol], partial(BoundedHttpProtocol, limits))


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, bounded."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head = True
        """No request has begun, or one whose head is not complete."""
        self._bare_bytes = 0
        """Received since a head ended, or a part of a body: of the next head, or of trailers."""
        self._parsed_bytes = 0
        """Of the target and the header fields of the request that is being read."""
        self._seen_once: set[bytes] = set()
        """Of the fields that may come once, those that came."""
        self._answered: RequestResponseCycle | None = None
        """The request whose reply is under way; `cycle` is the newest, which may have to wait."""
        self._num_parts = 0
        """Heads that have ended, and parts and ends of bodies, so far."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._has_resumed = False
        """Whether the reader took enough, since the last check, to be sent more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Count what comes and is no part of a body."""
        if self._in_head and self._bare_bytes == 0:
            data = _without_upgrade(data)
        before = self._num_parts
        super().data_received(data)
        if self.transport.is_closing():
            return
        # What followed a part is less than one read; it is not counted.
        is_bare = self._num_parts == before
        self._bare_bytes = self._bare_bytes + len(data) if is_bare else 0
        if self._bare_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        elif self._in_head and self._bare_bytes and not self._is_answering:
            self._expect_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")  # ends the parsing
        self._parsed_bytes = 0
        self._seen_once.clear()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field; one that trails a body is dropped, as RFC 9110, 6.5.1 has it."""
        if self._in_head:
            self._parsed_bytes += len(name) + len(value) + len(": \r\n")
            if (lowered := name.lower()) in _ONCE:
                if lowered in self._seen_once:
                    raise ValueError("a field twice")  # ends the parsing
                self._seen_once.add(lowered)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete. One that came in a single read is measured only here."""
        if self._parsed_bytes > self._limits.max_head_bytes:
            self._refuse_head()
            raise ValueError("too large a head")  # ends the parsing
        assert self.parser is not None, "it is calling"
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # its client would take that for the reply
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        self._in_head = False
        self._num_parts += 1
        self._cancel_head_timer()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._num_parts += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head may come."""
        self._in_head = True
        self._num_parts += 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The reply is written, but maybe not taken yet."""
        self._answered = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._watch_writes()

    def pause_writing(self) -> None:
        """The reader is slower than we are."""
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        """The reader took what was held up."""
        super().resume_writing()
        self._has_resumed = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the request that is being answered, not the newest alone."""
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._cancel_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: at a fault of the client, or because we refused its head."""
        if self._may_answer:
            super().send_400_response(msg)
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        cycle = cast(RequestResponseCycle | None, self.cycle)
        return cycle is not None and not cycle.response_complete

    @property
    def _may_answer(self) -> bool:
        """Whether a reply that is written now would be taken for that to what is being read."""
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if self.transport.is_closing():
            return False
        if self._in_head:
            return cycle is None or cycle.response_complete
        assert cycle is not None
        return not cycle.response_started and not self.pipeline

    def _refuse_head(self) -> None:
        if self._may_answer:
            self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._later(self._limits.head_seconds, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_writes(self) -> None:
        if self._write_timer is None and self.transport.get_write_buffer_size():
            self._check_writes_later()

    def _check_writes_later(self) -> None:
        self._has_resumed = False
        size = self.transport.get_write_buffer_size()
        self._write_timer = self._later(
            self._limits.stalled_write_seconds, lambda: self._check_writes(size)
        )

    def _check_writes(self, size_before: int) -> None:
        self._write_timer = None
        size = self.transport.get_write_buffer_size()
        if size >= size_before and not self._has_resumed:
            self.transport.abort()
        elif size:
            self._check_writes_later()

    def _later(self, seconds: float, work: Callable[[], object]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, work)


def _without_upgrade(data: bytes) -> bytes:
    """Ignore an `Upgrade` that we do not support, as RFC 9110 has it.

    The parser would take what follows the head for the other protocol: the body of Java's
    `HttpClient`, which offers h2c with its first request, would be lost.
    """
    end = data.find(_END_OF_HEAD)
    if end < 0:
        return data
    found = _UPGRADE.search(data, 0, end)
    return data if found is None else data[: found.start()] + data[found.end() :]
