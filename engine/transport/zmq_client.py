"""The service's side of the engine's socket."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from engine.adapters.fetcher import AdapterFetcher
from engine.client import FetchAdapter, OnJoin, OnOrphans
from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from engine.errors import ClientClosed, EngineUnavailable, RequestRefused
from engine.messages import (
    Abort,
    AbortReason,
    Accepted,
    Alive,
    CallUsage,
    ClientMessage,
    Drain,
    EndCalls,
    EngineMessage,
    EngineRequest,
    Forget,
    Generate,
    GetStats,
    Goodbye,
    Heartbeat,
    Hello,
    Need,
    Orphans,
    Outputs,
    Refused,
    SetResidency,
    Settle,
    Stats,
    Unload,
    Welcome,
)
from engine.telemetry.records import Cursor, GetTelemetry, Telemetry
from engine.transport.dealer import close_dealer, open_dealer
from engine.transport.open_requests import OpenRequests
from engine.transport.outbox import Outbox
from engine.transport.pending_answers import PendingAnswers
from engine.transport.request_stream import RequestStream
from engine.transport.wire import MAX_CLIENT_MESSAGE, Codec, WireError
from engine.transport.zmq_reader import ZmqReader

_CLOSED = "the service is shutting down"


class ZmqEngineClient:
    """`engine.client.EngineClient` over ZeroMQ; works under asyncio and uvloop.

    All methods belong to the loop that ran `start`. The engine counts as lost when its process died
    or was restarted, when it dropped this client, or when it was silent for `dead_after` seconds.
    Then everything pending fails at once with `EngineUnavailable`, and the client says hello until
    an engine answers.
    """

    def __init__(
        self,
        socket_path: Path,
        fetch: FetchAdapter,
        *,
        beat_seconds: float = 0.5,
        doubt_after: float = 30.0,
        dead_after: float = 150.0,
        stats_timeout: float = 5.0,
    ) -> None:
        """Prepare; `start` connects.

        The engine is silent during a step. It counts as not ready after `doubt_after` seconds of
        silence, and as lost after `dead_after`, which must be longer than a step may last
        (`EngineArgs.hang_seconds`).
        """
        self._socket_path = socket_path
        self._fetch = fetch
        self._beat_seconds = beat_seconds
        self._doubt_after = doubt_after
        self._dead_after = dead_after
        self._codec = Codec()
        self._request_ids = itertools.count(1)
        self._requests = OpenRequests()
        self._answers = PendingAnswers(stats_timeout)
        self._outbox = Outbox(self._send)
        self._welcome: Welcome | None = None  # the engine's, while it is there
        self._info: EngineInfo | None = None
        self._abandoned: tuple[int, list[int]] = 0, []
        """The session that was lost last, and the ids of its requests."""
        self._is_draining = False
        self._is_warming = False
        self._joined: list[OnJoin] = []
        self._adopt: OnOrphans | None = None
        self._orphans: list[CallUsage] = []
        self._is_connected = self._is_open = False
        self._last_heard = 0.0
        self._ready = asyncio.Event()
        self._log = structlog.get_logger("engine.client")

    async def start(self) -> None:
        """Connect and begin to say hello; returns without waiting for the engine."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_dealer(self._context)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._is_open = True
        self._fetcher = AdapterFetcher(self._fetch, self._send_surely)
        self._reader = ZmqReader(self._socket, self._on_message)
        self._monitor_reader = ZmqReader(self._monitor, self._on_connection_event)
        self._socket.connect(f"ipc://{self._socket_path}")
        self._beats = asyncio.get_running_loop().create_task(self._beat())

    async def wait_ready(self, seconds: float) -> None:
        """Wait for the engine's welcome; raises `EngineUnavailable`."""
        try:
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        except TimeoutError:
            raise EngineUnavailable(f"the engine did not answer within {seconds:g} s") from None

    async def close(self) -> None:
        """End pending requests and let go of the socket; harmless if it was called before."""
        if not self._is_open:
            return
        last_words = None
        if self._welcome is not None:
            self._outbox.flush()
            last_words = self._codec.encode(Goodbye())
        self._is_open = False
        self._beats.cancel()
        await asyncio.gather(self._beats, return_exceptions=True)
        await self._fetcher.close()
        self._lose(_CLOSED, ClientClosed)
        self._reader.close()
        self._monitor_reader.close()
        self._socket.disable_monitor()
        self._monitor.close()
        close_dealer(self._socket, last_words)
        self._context.term()

    @property
    def is_ready(self) -> bool:
        """Whether the engine answers now and takes requests."""
        if self._welcome is None or self._is_draining:
            return False
        return asyncio.get_running_loop().time() - self._last_heard <= self._doubt_after

    @property
    def is_warming(self) -> bool:
        """Whether the engine is new, and still loads what it starts with."""
        return self._is_warming

    @property
    def info(self) -> EngineInfo:
        """The engine's effective limits; the last known ones while it is away."""
        if self._info is None:
            raise EngineUnavailable("the engine has not started yet")
        return self._info

    def next_request_id(self) -> int:
        """A number that this client has not used before."""
        return next(self._request_ids)

    async def generate(self, request: EngineRequest) -> RequestStream:
        """Queue a request, then iterate over its outputs; see `EngineClient`."""
        if not self._is_open:
            raise ClientClosed(_CLOSED)
        welcome = self._welcome
        if welcome is None:
            raise EngineUnavailable("the engine is not there")
        if self._is_draining:
            raise EngineUnavailable("the engine is shutting down")
        payload = self._codec.encode(Generate(request, session=welcome.session))
        if len(payload) > MAX_CLIENT_MESSAGE:
            raise RequestRefused(
                "request_too_large",
                f"the request has {len(payload)} bytes, more than {MAX_CLIENT_MESSAGE}",
                limit=MAX_CLIENT_MESSAGE,
            )
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        if not self._send_bytes(payload):
            raise RequestRefused("queue_full", "the engine's inbox is full; try again later")
        stream = self._requests.open(request.request_id)
        try:
            await stream.wait_accepted()
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise
        return stream

    def abort(
        self, request_id: int, reason: AbortReason = "abort", num_tokens: int | None = None
    ) -> None:
        """Forget a request; harmless if it is unknown or over. See `EngineClient`."""
        if self._requests.end(request_id):
            self._send_surely(Abort(request_id, reason, num_tokens))

    def settle(self, calls: Sequence[str]) -> None:
        """The usage of these calls is written, or nobody's."""
        self._send_surely(Settle(list(calls)))

    def on_orphans(self, told: OnOrphans) -> None:
        """Have `told` called with what other clients have left; see `EngineClient`."""
        self._adopt = told
        self._take_orphans([])

    def end_calls(self, order: EndCalls) -> None:
        """End requests of a tenant, also those of other clients; see `EndCalls`."""
        self._send_surely(order)

    def forget(self, tenant: str, adapter: str | None = None) -> None:
        """An adapter, or a whole tenant, was deleted; see `EngineClient`."""
        self._send_surely(Forget(tenant, adapter))

    def note_refusal(self, tenant: str, adapter: str | None, code: str) -> None:
        """The service refused a request; see `EngineClient`. Told by beats, and at the end."""
        self._outbox.refusals.note(tenant, adapter, code)

    def unload(self, digest: str) -> None:
        """Drop an adapter that no live version names any more."""
        self._send_surely(Unload(digest))

    def set_residency(
        self, pinned: Sequence[str], warm: Sequence[str], recent: Sequence[str] = ()
    ) -> None:
        """Say which adapters are pinned and warm; see `EngineClient`."""
        if self._welcome is not None:  # else `on_join` will ask for it
            self._send_surely(SetResidency(list(pinned), list(warm), list(recent)))

    def on_join(self, joined: OnJoin) -> None:
        """Have `joined` called whenever the engine has welcomed this client, now if it has."""
        self._joined.append(joined)
        if self._welcome is not None:
            joined(self._welcome.recent)

    async def stats(self) -> EngineStats:
        """A snapshot of the engine; raises `EngineUnavailable`."""
        return (await self._answers.ask(lambda n: self._ask(GetStats(n)), Stats)).stats

    async def telemetry(
        self, cursor: Cursor | None = None, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        """Records since a cursor; see `EngineClient`."""
        question = GetTelemetry(cursor=cursor or Cursor(), limit=limit, with_totals=with_totals)
        return await self._answers.ask(
            lambda n: self._ask(msgspec.structs.replace(question, call_id=n)), Telemetry
        )

    async def drain(self) -> None:
        """Stop taking requests; those queued or running go on."""
        self._is_draining = True
        self._send_surely(Drain())

    # -- sending

    def _ask(self, question: GetStats | GetTelemetry) -> bool:
        return self._welcome is not None and self._send(question)

    def _send(self, message: ClientMessage) -> bool:
        return self._send_bytes(self._codec.encode(message))

    def _send_bytes(self, payload: bytes) -> bool:
        if not self._is_open:
            return False
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._reader.poke()
        return True

    def _send_surely(self, message: ClientMessage) -> None:
        """Send now or with a later beat; dropped only if the engine is lost before."""
        if self._is_open:
            self._outbox.send(message)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._reader.read_all()  # if this loop was slow, unread messages are not silence
            if self._welcome is None:
                if self._is_connected:  # else they would pile up
                    self._send(Hello())
            elif loop.time() - self._last_heard > self._dead_after:
                self._lose(f"the engine has been silent for {self._dead_after:g} s")
            else:
                self._send(Heartbeat())
                self._outbox.flush()
            await asyncio.sleep(self._beat_seconds)

    # -- receiving

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            message = self._codec.decode_engine(b"".join(frames))
        except WireError as error:
            self._log.error("malformed_message", reason=str(error))
            return
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif self._welcome is None or message.generation < self._welcome.generation:
            return  # late words of an engine that counts as lost
        elif message.generation > self._welcome.generation:
            self._lose("the engine was restarted")
        else:
            self._last_heard = asyncio.get_running_loop().time()
            self._on_answer(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._last_heard = asyncio.get_running_loop().time()
        known = self._welcome
        if known is not None and known.session == welcome.session:
            return
        if known is not None:
            same = known.generation == welcome.generation
            self._lose("the engine lost this client" if same else "the engine was restarted")
        self._welcome = welcome
        self._info = welcome.info
        self._is_draining = False
        self._is_warming = welcome.warming
        self._ready.set()
        session, request_ids = self._abandoned
        if session == welcome.session:  # it was only slow, and still runs what was given up here
            for request_id in request_ids:
                self._send_surely(Abort(request_id))
        self._log.info("engine_connected", generation=welcome.generation)
        for joined in self._joined:
            joined(welcome.recent)

    def _on_answer(self, message: EngineMessage) -> None:
        match message:
            case Alive():
                self._is_draining = self._is_draining or message.draining
                self._is_warming = message.warming
            case Accepted():
                self._requests.accept(message.request_id)
            case Refused():
                self._on_refused(message)
            case Outputs():
                self._requests.push(message.outputs)
            case Need():
                self._fetcher.start(message.digest)
            case Orphans():
                self._take_orphans(message.calls)
            case Stats() | Telemetry():
                self._answers.answer(message.call_id, message)
            case Welcome():
                raise AssertionError("handled before")

    def _take_orphans(self, calls: list[CallUsage]) -> None:
        self._orphans += calls
        if self._adopt is not None and self._orphans:
            orphans, self._orphans = self._orphans, []
            self._adopt(orphans)

    def _on_refused(self, message: Refused) -> None:
        if message.request_id not in self._requests:
            return
        if message.code == "draining":
            self._is_draining = True
            error = EngineUnavailable(message.message)
        else:
            error = message.refusal
        self._requests.fail(message.request_id, error)

    def _on_connection_event(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
            self._is_connected = False
            self._reader.read_all()  # read its last words before acting on its end
            self._lose("the engine's process ended")
        else:
            self._is_connected = True
            self._send(Hello())

    def _lose(self, reason: str, kind: type[EngineUnavailable] = EngineUnavailable) -> None:
        request_ids = self._requests.ids
        if self._welcome is not None:
            self._abandoned = self._welcome.session, request_ids
        self._welcome = None
        self._ready.clear()
        self._outbox.clear()
        if kind is not ClientClosed and (request_ids or len(self._answers)):
            self._log.warning("engine_lost", reason=reason, failed=len(request_ids))
        self._requests.fail_all(reason, kind)
        self._answers.fail(reason, kind)
