"""One viewer's events: a bounded queue, and the reply that sends it."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from loraplex.dashboard.sessions import SessionEnd, Viewer
from loraplex.dashboard.views import Ended
from loraplex.disconnect import until_disconnect

MAX_QUEUED = 16
"""Events; a viewer that takes none loses the oldest, and keeps what is newest."""
HEARTBEAT_SECONDS = 10.0
_HEARTBEAT = b": heartbeat\n\n"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def event(name: str, data: msgspec.Struct) -> bytes:
    """An event as bytes."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


class LiveStream:
    """Events on their way to one viewer."""

    def __init__(self, viewer: Viewer, topics: frozenset[str]) -> None:
        self.viewer = viewer
        self.topics = topics
        self._events: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._arrived = asyncio.Event()
        self._is_over = False

    def put(self, data: bytes) -> None:
        """Queue an event; none is after the end."""
        if not self._is_over:
            self._events.append(data)
            self._arrived.set()

    def end(self, reason: SessionEnd) -> None:
        """Nothing comes any more; what is queued is dropped, for it may not be seen any more."""
        if not self._is_over:
            self._events.clear()
            self.put(event("ended", Ended(reason)))
            self._is_over = True

    async def next(self, seconds: float) -> bytes | None:
        """All that is queued, a heartbeat after so long without any; None at the end."""
        if not self._events:
            if self._is_over:
                return None
            self._arrived.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
            except TimeoutError:
                return _HEARTBEAT
        data = b"".join(self._events)
        self._events.clear()
        return data


class LiveResponse(ASGIResponse):
    """Sends a stream's events until it ends or the viewer goes away, then `close`s it."""

    _should_set_content_length = False  # Litestar's own switch, as its streaming response sets it

    def __init__(self, stream: LiveStream, close: Callable[[LiveStream], None]) -> None:
        super().__init__(media_type="text/event-stream", headers=_HEADERS)
        self._stream = stream
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send status, events and the end."""
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait([sending, watching], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:  # no await: of a task that is being cancelled each is cancelled again
            sending.cancel()
            watching.cancel()
            self._close(self._stream)

    async def _send(self, send: Send) -> None:
        headers = [(name.lower(), value) for name, value in self.encode_headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while (data := await self._stream.next(HEARTBEAT_SECONDS)) is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
