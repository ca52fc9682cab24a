"""A call's reply on the wire: streamed as server-sent events, or whole.

Plain ASGI instead of Litestar's `ServerSentEvent`: one `send` takes all that arrived, and cleaning
up is synchronous, because every `await` of a task that is being cancelled is cancelled again.
"""

import asyncio
import time

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from loraplex.body_writer import body_writer
from loraplex.disconnect import until_disconnect
from loraplex.drain import SERVER_SEND
from loraplex.errors import as_api_error, client_gone, openai_body
from loraplex.logs import log_unexpected
from loraplex.openai.call import Call
from loraplex.openai.generation import Generation, Piece
from loraplex.openai.reply_format import DONE, KEEP_ALIVE, ReplyFormat

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(ASGIResponse):
    """Sends a call that the engine has queued; ends it when the client goes away."""

    _should_set_content_length = False  # Litestar's own switch, as its streaming response sets it

    def __init__(
        self, call: Call, reply: ReplyFormat, *, include_usage: bool, keep_alive_seconds: float
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={**_HEADERS, **call.rate_headers, "x-loraplex-adapter": call.target.label},
        )
        self._call = call
        self._reply = reply
        self._include_usage = include_usage
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send status, events and the end."""
        call = self._call
        watcher = asyncio.create_task(_abort_on_disconnect(receive, call.generation))
        sender = _EventSender(scope["state"].get(SERVER_SEND, send))
        pulse = asyncio.create_task(sender.keep_alive(self._keep_alive_seconds))
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": self._raw_headers()}
            )
            # In a task of its own, so that a token's wake-up does not climb through all middleware.
            await asyncio.create_task(self._send_events(sender, scope))
            pulse.cancel()  # nothing may follow the end
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            pulse.cancel()
            call.close()

    async def _send_events(self, sender: "_EventSender", scope: Scope) -> None:
        try:
            await sender.send(self._reply.opening(len(self._call.generation.choices)))
            while pieces := await self._call.generation.next(
                lambda pieces: sender.send_now(self._events(pieces))
            ):
                await sender.send(self._events(pieces))
            if self._call.generation.is_done:
                await self._call.finish()  # who has seen the end can read what it cost
                await sender.send(self._end())
        except Exception as error:
            # The status is out: what went wrong can only be said in the stream, without [DONE].
            self._call.fail()
            await self._call.finish()
            answer = as_api_error(error)
            if answer.code == "internal_error":
                log_unexpected(scope, error)
            body = msgspec.json.encode(openai_body(answer))
            await sender.send(b"data: %b\n\n" % body)

    def _events(self, pieces: list[Piece]) -> bytes:
        reply = self._reply
        if not self._call.generation.is_done:
            return b"".join([reply.event(piece) for piece in pieces])
        events = [reply.event(piece) for piece in pieces[:-1]]
        timing = None if self._include_usage else self._call.timing
        return b"".join((*events, reply.event(pieces[-1], timing)))

    def _end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._reply.usage_event(self._call.usage, self._call.timing) + DONE

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.lower(), value) for name, value in self.encode_headers()]


class _EventSender:
    """Sends whole events, and a comment after a long silence."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._write = body_writer(send)
        self._sent_at = time.monotonic()
        self._is_sending = False

    async def send(self, events: bytes) -> None:
        if not events:
            return
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._is_sending = False
        self._sent_at = time.monotonic()

    def send_now(self, events: bytes) -> bool:
        """Send without waiting; False where that cannot be."""
        if self._is_sending or (events and not self._write(events)):
            return False
        self._sent_at = time.monotonic()
        return True

    async def keep_alive(self, seconds: float) -> None:
        while True:
            silence = time.monotonic() - self._sent_at
            await asyncio.sleep(max(seconds - silence, 0.01))
            if not self._is_sending and time.monotonic() - self._sent_at >= seconds:
                await self.send(KEEP_ALIVE)


async def send_whole(call: Call, reply: ReplyFormat, receive: Receive) -> ASGIResponse:
    """Wait for the whole call and return its reply; raises what ended it early."""
    watcher = asyncio.create_task(_abort_on_disconnect(receive, call.generation))
    pieces: list[list[Piece]] = [[] for _ in call.generation.choices]

    def keep(arrived: list[Piece]) -> bool:
        for piece in arrived:
            pieces[piece.choice_index].append(piece)
        return True

    try:
        while arrived := await call.generation.next(keep):
            keep(arrived)
        if call.generation.is_done:
            await call.finish()
    except Exception:
        call.fail()
        await call.finish()
        raise
    finally:
        watcher.cancel()
        timing, usage = call.timing, call.usage
        call.close()
    if not call.generation.is_done:
        raise client_gone()
    return ASGIResponse(
        body=reply.whole(pieces, usage),
        media_type="application/json",
        headers={**timing.headers(), **call.rate_headers},
    )


async def _abort_on_disconnect(receive: Receive, generation: Generation) -> None:
    await until_disconnect(receive)
    generation.abort()
