"""The engine's loop: take messages, run a step, send what it produced.

One thread does all of it. It never waits for a client. Only while there is nothing to compute does
it sleep, until a message, an adapter's arrival or the next beat.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq

from adapter_store.digest import is_digest
from engine.core import ClientOutput
from engine.errors import RequestRefused
from engine.messages import (
    Abort,
    Accepted,
    Alive,
    ClientMessage,
    Drain,
    EndCalls,
    EngineMessage,
    FetchFailed,
    Forget,
    Generate,
    GetStats,
    Goodbye,
    Have,
    Heartbeat,
    Hello,
    Need,
    Orphans,
    Outputs,
    Refused,
    RequestOutput,
    SetResidency,
    Settle,
    Stats,
    Unload,
    Welcome,
)
from engine.parts import EngineParts
from engine.refusal_notes import NoteRefusals
from engine.telemetry.records import GetTelemetry
from engine.transport.client_socket import ClientSocket
from engine.transport.peer import Peer
from engine.transport.usage_ledger import UsageLedger
from engine.transport.wire import Codec, WireError

BEAT_SECONDS = 0.5
RETRY_SECONDS = 0.02
"""Pause before a full client queue is tried again while there is nothing else to do."""
MAX_MESSAGES_PER_TURN = 1000
"""Messages handled before the next step runs, however many more are waiting."""
MAX_REASON = 500
"""Characters of a client's reason that are passed on."""


class EngineServer:
    """Serves one engine on an ipc socket until it is stopped."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        socket_path: Path,
        generation: int,
        drain_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the socket, so that clients find a server; raises `ConfigError`."""
        self._stats = parts.stats
        self._core = parts.core
        self._host = parts.host
        self._desk = parts.desk
        self._residency = parts.residency
        self._wake = parts.wake
        self._info = parts.info
        self._journal = parts.journal
        self._generation = generation
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._codec = Codec()
        self._peers: dict[bytes, Peer] = {}
        self._ledger = UsageLedger()
        self._lost: set[bytes] = set()
        """Clients to drop as soon as no loop over the peers is under way."""
        self._next_beat = clock()
        self._was_warming = parts.residency.is_warming
        self._draining = False
        self._num_stops = 0
        """Number of `stop` calls; written by signal handlers, read by the loop."""
        self._stop_at: float | None = None
        self.last_turn = clock()
        """When the last turn of the loop began, by `clock`; a watchdog reads it."""
        self._log = structlog.get_logger("engine.server")
        self._socket = ClientSocket(socket_path)
        self._poller = zmq.Poller()
        self._poller.register(self._socket.socket, zmq.POLLIN)
        self._poller.register(parts.wake.fileno(), zmq.POLLIN)

    def stop(self) -> None:
        """Drain, then end; a second call ends at once. For signal handlers and other threads."""
        self._num_stops += 1
        self._wake.set()

    def run(self) -> int:
        """Serve until stopped (0), or until the core fails (1): the process's exit code."""
        try:
            while True:
                self.last_turn = self._clock()
                is_inbox_empty = self._take_messages()
                was_woken = self._wake.clear()
                self._keep_house(is_inbox_empty)
                if self._is_over():
                    self._end_all("engine_stopped", "the engine was stopped")
                    return 0
                if was_woken or self._core.has_work:
                    self._send_outputs(self._core.step())
                for client, digest in self._desk.assign(self._peers):
                    self._send(client, Need(self._generation, digest))
                if not self._core.has_work:
                    self._sleep()
        except Exception:
            # The core's state cannot be trusted any more; the supervisor starts a new process.
            self._log.exception("engine_failed")
            self._end_all("engine_error", "the engine failed while it ran this request")
            return 1
        finally:
            self._socket.flush(self._clock())
            self._socket.close()

    # -- the inbox

    def _take_messages(self) -> bool:
        for _ in range(MAX_MESSAGES_PER_TURN):
            received = self._socket.receive()
            if received is None:
                return True
            client, frames = received
            try:
                if len(frames) != 1:
                    raise WireError(f"a message has one frame, not {len(frames)}")
                message = self._codec.decode_client(frames[0])
            except WireError as error:
                self._log.warning("malformed_message", client=client.hex(), reason=str(error))
                continue
            self._handle(client, message)
        return False

    def _handle(self, client: bytes, message: ClientMessage) -> None:
        peer = self._peers.get(client)
        if isinstance(message, GetStats | GetTelemetry):  # watchers ask without saying hello
            self._send_what_is(client, message)
            return
        if peer is None:
            # Anything else comes from a client that was dropped, or from before a restart.
            if isinstance(message, Hello | Heartbeat):
                self._welcome(client)
            return
        peer.last_heard = self._clock()
        match message:
            case Hello():
                self._send(client, self._welcome_of(peer))
            case Heartbeat():
                pass
            case Generate():
                self._generate(peer, message)
            case Abort():
                peer.live.discard(message.request_id)
                self._ledger.abort(client, message.request_id)
                self._core.abort(client, message.request_id, message.reason, message.num_tokens)
            case Have():
                self._desk.close(message.digest)
                self._host.have(message.digest)
            case FetchFailed():
                if self._desk.is_asked(client, message.digest):
                    self._desk.close(message.digest)
                    self._host.fetch_failed(message.digest, message.reason[:MAX_REASON])
            case Unload():
                if is_digest(message.digest):
                    self._core.unload(message.digest)
            case SetResidency():
                self._residency.set(message.pinned, message.warm, message.recent)
            case EndCalls():
                self._core.end_calls(message)
            case Forget():
                self._journal.forget(message.tenant, message.adapter)
            case Settle():
                self._ledger.settle(client, message.calls)
            case NoteRefusals():
                for noted in message.refusals:
                    self._journal.note_refusals(
                        noted.tenant, noted.adapter, noted.code, noted.number
                    )
            case Goodbye():
                peer.has_left = True
                self._lost.add(client)
            case Drain():
                self._start_draining()

    def _welcome(self, client: bytes) -> None:
        peer = self._peers[client] = Peer(client, last_heard=self._clock())
        self._log.info("client_joined", client=client.hex())
        self._send(client, self._welcome_of(peer))
        if self._draining:
            self._send(client, self._alive)

    def _welcome_of(self, peer: Peer) -> Welcome:
        return Welcome(
            self._generation,
            self._info,
            peer.session,
            warming=self._residency.is_warming,
            recent=self._host.recent,
        )

    @property
    def _alive(self) -> Alive:
        return Alive(self._generation, self._draining, self._residency.is_warming)

    def _generate(self, peer: Peer, message: Generate) -> None:
        request = message.request
        if message.session != peer.session:
            return  # its client has failed it already
        try:
            if self._draining:
                raise RequestRefused("draining", "the engine is shutting down")
            if request.adapter is not None and not is_digest(request.adapter):
                raise RequestRefused(
                    "invalid_adapter", "adapter must be a SHA-256 in hex", param="adapter"
                )
            if request.request_id in peer.live:
                raise RequestRefused("duplicate_request_id", "this request id is in use")
            self._core.add(peer.client, request)
        except RequestRefused as refusal:
            self._refuse(peer.client, request.request_id, refusal)
            return
        except Exception:
            # A request that the core cannot take must not end all others.
            self._log.exception("request_failed", client=peer.client.hex())
            self._core.abort(peer.client, request.request_id)
            refusal = RequestRefused("engine_error", "the engine could not take this request")
            self._refuse(peer.client, request.request_id, refusal)
            return
        peer.live.add(request.request_id)
        self._ledger.begin(peer.client, request)
        self._send(peer.client, Accepted(self._generation, request.request_id))

    def _refuse(self, client: bytes, request_id: int, refusal: RequestRefused) -> None:
        self._send(client, Refused.of(self._generation, request_id, refusal))

    def _send_what_is(self, client: bytes, question: GetStats | GetTelemetry) -> None:
        if isinstance(question, GetTelemetry):
            self._send(client, self._journal.telemetry(question, self._generation))
            return
        self._send(client, Stats(self._generation, question.call_id, self._stats()))

    # -- clients that live, and those that do not

    def _keep_house(self, is_inbox_empty: bool) -> None:
        now = self._clock()
        if self._was_warming and not self._residency.is_warming:
            self._was_warming = False
            self._next_beat = now  # all clients learn of it at once
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            for client in self._peers:
                self._send(client, self._alive)
            if forgotten := self._ledger.take_forgotten():
                self._log.error("usage_forgotten", calls=forgotten)
        self._lost.update(self._socket.flush(now))
        if is_inbox_empty:
            # Otherwise a client may seem silent only because a long step kept its messages unread.
            self._lost.update(p.client for p in self._peers.values() if now >= p.silent_at)
        self._drop_lost()

    def _drop_lost(self) -> None:
        for client in self._lost:
            peer = self._peers.pop(client, None)
            if peer is not None:
                if peer.has_left:
                    self._log.info("client_left", client=client.hex(), aborted=len(peer.live))
                else:
                    self._log.warning("client_lost", client=client.hex(), aborted=len(peer.live))
                self._core.abort_client(client)
                self._desk.client_gone(client)
                self._ledger.client_gone(client)
        self._socket.forget(self._lost)
        self._lost.clear()
        if self._ledger.has_orphans:
            for client in self._peers:
                self._send(client, Orphans(self._generation, self._ledger.hand_over(client)))
                break

    def _send(self, client: bytes, message: EngineMessage) -> None:
        if not self._socket.send(client, self._codec.encode(message), self._clock()):
            self._lost.add(client)

    def _sleep(self) -> None:
        if self._lost:
            return
        wake_at = min([self._next_beat, *(peer.silent_at for peer in self._peers.values())])
        if self._stop_at is not None:
            wake_at = min(wake_at, self._stop_at)
        seconds = max(0.0, wake_at - self._clock())
        if self._socket.has_backlog:
            seconds = min(seconds, RETRY_SECONDS)
        # Rounded up: if the poll ended too early, the loop would spin until the time has come.
        self._poller.poll(int(seconds * 1000) + 1)

    def _send_outputs(self, outputs: list[ClientOutput]) -> None:
        by_client: defaultdict[bytes, list[RequestOutput]] = defaultdict(list)
        for client, output in outputs:
            assert isinstance(client, bytes)
            peer = self._peers.get(client)
            if peer is None or output.request_id not in peer.live:
                continue
            if output.finished:
                peer.live.discard(output.request_id)
            self._ledger.note(client, output)
            by_client[client].append(output)
        for client, of_client in by_client.items():
            self._send(client, Outputs(self._generation, of_client))

    # -- the end

    def _start_draining(self) -> None:
        if not self._draining:
            self._draining = True
            self._next_beat = self._clock()  # all clients learn of it at once
            self._log.info("draining", live=self._num_live)

    def _is_over(self) -> bool:
        if self._num_stops == 0:
            return False
        now = self._clock()
        if self._stop_at is None:
            self._start_draining()
            self._stop_at = now + self._drain_seconds
        if self._num_stops > 1:
            self._stop_at = now
        return self._num_live == 0 or now >= self._stop_at

    @property
    def _num_live(self) -> int:
        return sum(len(peer.live) for peer in self._peers.values())

    def _end_all(self, code: str, reason: str) -> None:
        for peer in self._peers.values():
            if peer.live:
                last = [
                    RequestOutput(request_id, finished=True, error_code=code, error=reason)
                    for request_id in sorted(peer.live)
                ]
                peer.live.clear()
                self._send(peer.client, Outputs(self._generation, last))
