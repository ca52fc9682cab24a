"""A scripted engine behind its real socket: in a thread, or in a process of its own.

`python -m tests.support.engine_server ARGS.json BEHAVIOUR` is `engine.process` with the scripted
runner instead of a model.
"""

import contextlib
import gc
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from engine.config import SchedulerConfig
from engine.engine_args import EngineArgs, parse_engine_args
from engine.logs import configure_logs
from engine.messages import (
    ClientMessage,
    EngineMessage,
    Generate,
    GetStats,
    Heartbeat,
    Hello,
    Outputs,
    RequestOutput,
    Stats,
    Welcome,
)
from engine.parent import die_with_parent
from engine.parts import EngineParts
from engine.process import serve
from engine.scheduled_batch import ScheduledBatch
from engine.transport.server import EngineServer
from engine.transport.wire import Codec
from tests.support.scripted_engine import (
    FakeWeights,
    ScriptedRunner,
    echo,
    endless,
    load_fake_adapter,
    scripted_parts,
)
from tests.support.waiting import SECONDS, until

M = TypeVar("M", bound=EngineMessage)
ROOT = Path(__file__).parents[2]
LONG = SchedulerConfig(num_kv_blocks=8192, max_num_seqs=16, max_model_len=100_000)
"""For requests that outlast whatever happens to them, however slow the machine is."""


class StandingClock:
    """A server's clock that only its test moves, so that nobody falls silent meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RawClient:
    """A bare DEALER that speaks the protocol only as far as it is told to."""

    def __init__(self, socket_path: Path, **options: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, secrets.token_bytes(8))
        self._socket.set(zmq.LINGER, 0)
        for name, value in options.items():
            self._socket.set(getattr(zmq, name), value)
        self._socket.connect(f"ipc://{socket_path}")
        self._codec = Codec()
        self.session = 0

    def join(self) -> Welcome:
        self.send(Hello())
        welcome = self.receive(Welcome)
        self.session = welcome.session
        return welcome

    def send(self, message: ClientMessage) -> None:
        if isinstance(message, Generate) and message.session == 0:
            message = msgspec.structs.replace(message, session=self.session)
        self._socket.send(self._codec.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def try_receive(self, seconds: float) -> EngineMessage | None:
        if not self._socket.poll(int(seconds * 1000)):
            return None
        return self._codec.decode_engine(self._socket.recv())

    def receive(self, kind: type[M]) -> M:
        """The next message of this kind; others are skipped. Beats meanwhile."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            message = self.try_receive(0.2)
            if isinstance(message, kind):
                return message
            self.send(Heartbeat())
        raise AssertionError(f"no {kind} within {SECONDS} s")

    def receive_last(self, request_id: int) -> RequestOutput:
        """A request's last output."""
        while True:
            for output in self.receive(Outputs).outputs:
                if output.request_id == request_id and output.finished:
                    return output

    def stats(self) -> Stats:
        self.send(GetStats(1))
        return self.receive(Stats)

    def wait_idle(self) -> None:
        """Wait until the engine has no request."""
        until(lambda: (stats := self.stats().stats).running == stats.waiting == 0)

    def close(self) -> None:
        self._context.destroy(linger=0)


class ServerThread:
    """An `EngineServer` on a thread."""

    def __init__(self, folder: Path, server: EngineServer, parts: EngineParts) -> None:
        self.folder = folder
        self.socket_path = folder / "engine.sock"
        self.cache_dir = folder / "cache"
        self.server = server
        self.parts = parts
        self.exit_code: int | None = None
        self._clients: list[RawClient] = []
        self._thread = threading.Thread(target=self._run, name="engine-server")
        self._thread.start()

    def client(self, **options: int) -> RawClient:
        made = RawClient(self.socket_path, **options)
        self._clients.append(made)
        return made

    def joined_client(self, **options: int) -> RawClient:
        made = self.client(**options)
        made.join()
        return made

    def join(self) -> int | None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the server did not end"
        return self.exit_code

    def check_integrity(self) -> None:
        """End the server, since its thread alone may look into its parts while it runs."""
        self.server.stop()
        self.server.stop()
        self.join()
        self.parts.core.check_integrity()
        self.parts.host.check_integrity()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.stop()
        self.server.stop()
        self.join()
        self.parts.close()

    def _run(self) -> None:
        self.exit_code = self.server.run()


@contextlib.contextmanager
def run_dir() -> Iterator[Path]:
    """A folder short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="lp-", dir="/tmp") as name:
        yield Path(name)


@contextlib.contextmanager
def server_thread(
    runner: ScriptedRunner,
    *,
    drain_seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
    config: SchedulerConfig | None = None,
) -> Iterator[ServerThread]:
    with run_dir() as folder:
        parts = scripted_parts(runner, folder / "cache", config=config)
        server = EngineServer(
            parts,
            socket_path=folder / "engine.sock",
            generation=1,
            drain_seconds=drain_seconds,
            clock=clock,
        )
        thread = ServerThread(folder, server, parts)
        try:
            yield thread
        finally:
            thread.close()


class EngineProcess:
    """A scripted engine in its own process, on a fixed socket path, started again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket_path = folder / "engine.sock"
        self.log_path = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._generation = 0

    def start(self, behaviour: str | None = "echo", **args: object) -> "subprocess.Popen[bytes]":
        """The scripted engine; with None the real one, whose `model_dir` is then needed."""
        self._generation += 1
        document = {
            "model_dir": str(self.folder),
            "socket_path": str(self.socket_path),
            "cache_dir": str(self.folder / "cache"),
            "generation": self._generation,
            **args,
        }
        path = self.folder / "args.json"
        path.write_bytes(msgspec.json.encode(document))
        module = ["tests.support.engine_server"] if behaviour else ["engine.process"]
        command = [sys.executable, "-m", *module, str(path), *([behaviour] if behaviour else [])]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log)
        return self.process

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def engine_process() -> Iterator[EngineProcess]:
    with run_dir() as folder:
        process = EngineProcess(folder)
        try:
            yield process
        finally:
            process.close()


def count_frozen(prompt: tuple[int, ...], adapter: str | None) -> list[int]:
    """Says 1 if what was loaded at the start is spared by collections."""
    return [int(gc.get_freeze_count() > 10_000)]


def main(args_path: str, behaviour: str, beat_fd: str | None = None) -> int:
    args: EngineArgs = parse_engine_args(Path(args_path).read_bytes())
    configure_logs(process="engine", generation=args.generation)
    die_with_parent(args.parent_pid)
    replies = {"echo": echo, "count_frozen": count_frozen}
    runner = ScriptedRunner(replies.get(behaviour, endless))

    def before_step(batch: ScheduledBatch) -> None:
        if behaviour == "slow":
            time.sleep(0.01)
        if behaviour == "crash" and runner.num_steps > 3:
            raise RuntimeError("the device fell off the bus")
        hangs = behaviour == "hang" or (behaviour == "hang_once" and args.generation == 1)
        if hangs and runner.num_steps > 3:
            threading.Event().wait()

    def load(digest: str, folder: Path) -> FakeWeights:
        if behaviour == "slow_load":
            time.sleep(2 * args.hang_seconds)
        return load_fake_adapter(digest, folder)

    runner.before_step = before_step
    parts = scripted_parts(runner, Path(args.cache_dir), load=load)
    return serve(parts, args, beat_fd=None if beat_fd is None else int(beat_fd))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
