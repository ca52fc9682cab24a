"""Reads an engine's records off its socket while it serves, without being one of its clients."""

import contextlib
import secrets
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import psutil
import zmq

from engine.telemetry.records import Cursor, GetTelemetry, RequestRecord, StepRecord, Telemetry
from engine.transport.wire import Codec

INTERVAL = 0.5
ANSWER_MS = 10_000


class StepWatcher:
    """Collects in a thread what is recorded from when it is made until it is closed."""

    def __init__(self, socket_path: Path) -> None:
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []
        self.num_missed = 0
        self._cursor = Cursor()
        self._socket_path = socket_path
        self._begun, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()
        if not self._begun.wait(2 * ANSWER_MS / 1e3):
            raise SystemExit("the engine does not answer")

    def close(self) -> None:
        """Read what is left, and end."""
        self._stop.set()
        self._thread.join()

    def _collect(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.IDENTITY, b"w" + secrets.token_bytes(15))
            socket.set(zmq.LINGER, 0)
            socket.connect(f"ipc://{self._socket_path}")
            # A cursor that lies ahead counts as now: nothing that was recorded before is read.
            generation = self._ask(socket, Cursor(), limit=1).generation
            ahead = Cursor(generation, sys.maxsize, sys.maxsize, sys.maxsize)
            self._cursor = self._ask(socket, ahead).cursor
            self._begun.set()
            while True:
                is_last = self._stop.wait(INTERVAL)
                while self._read(socket):
                    """There is more."""
                if is_last:
                    return

    def _read(self, socket: "zmq.Socket[bytes]") -> bool:
        answer = self._ask(socket, self._cursor)
        self._cursor = answer.cursor
        self.steps += answer.steps
        self.requests += answer.requests
        self.num_missed += answer.missed
        return answer.has_more

    def _ask(self, socket: "zmq.Socket[bytes]", cursor: Cursor, limit: int = 500) -> Telemetry:
        codec = Codec()
        socket.send(codec.encode(GetTelemetry(call_id=1, cursor=cursor, limit=limit)))
        while socket.poll(ANSWER_MS):
            answer = codec.decode_engine(b"".join(socket.recv_multipart()))
            if isinstance(answer, Telemetry):
                return answer
        raise SystemExit("the engine does not answer")


def engine_socket(service: psutil.Process) -> Path:
    """Where the engine of a `loraplex serve` listens."""
    for child in service.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for connection in child.net_connections("unix"):
                if str(connection.laddr).endswith("engine.sock"):
                    return Path(str(connection.laddr))
    raise SystemExit("the service has no engine")


@contextlib.contextmanager
def watched(service: psutil.Process) -> Generator[StepWatcher]:
    """Collect while the block runs."""
    watcher = StepWatcher(engine_socket(service))
    try:
        yield watcher
    finally:
        watcher.close()
