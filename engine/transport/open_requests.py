"""A client's requests that its engine has or is about to get, and the streams of their outputs."""

from collections.abc import Iterable

from engine.errors import EngineError, EngineUnavailable
from engine.messages import RequestOutput
from engine.transport.request_stream import RequestStream


class OpenRequests:
    """Belongs to one event loop. Outputs and errors of requests that are not open are dropped."""

    def __init__(self) -> None:
        self._streams: dict[int, RequestStream] = {}

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._streams

    @property
    def ids(self) -> list[int]:
        """Ids of the open requests, the oldest first."""
        return list(self._streams)

    def open(self, request_id: int) -> RequestStream:
        """Open a request, whose id is not in use."""
        stream = self._streams[request_id] = RequestStream()
        return stream

    def accept(self, request_id: int) -> None:
        """The engine has queued a request."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.accept()

    def push(self, outputs: Iterable[RequestOutput]) -> None:
        """Give each output to its reader; a `finished` one is its request's last."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                if output.finished:
                    del self._streams[output.request_id]
                stream.push(output)

    def end(self, request_id: int) -> bool:
        """Forget a request that this side has aborted; returns whether it was open."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.end()
        return stream is not None

    def fail(self, request_id: int, error: EngineError) -> None:
        """End a request with an error."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            stream.fail(error)

    def fail_all(self, reason: str, kind: type[EngineUnavailable] = EngineUnavailable) -> None:
        """End every request: the engine is lost, or this side closes."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(kind(reason))
