"""A service of the demo's own: fresh data directory, free port, gone when the demo ends."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from loraplex.supervisor.listeners import listen

START_SECONDS = 180.0
_STOP_SECONDS = 45.0
_PLAIN_SETTINGS = ("DATABASE_URL", "REDIS_URL")


class DemoError(Exception):
    """The demo cannot go on; the message says why and where the log lies."""


@dataclass(frozen=True, slots=True)
class DemoService:
    """A running service."""

    url: str
    admin_key: str
    data_dir: Path
    log: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def demo_service(
    model: Path, served_name: str, arguments: list[str], variables: Mapping[str, str] | None = None
) -> Generator[DemoService]:
    """Start `loraplex serve` on `model` and wait until it is ready; stop it at the end.

    Of the settings in the environment only `variables` count.
    """
    with tempfile.TemporaryDirectory(prefix="loraplex-demo-") as folder:
        port = free_port()
        admin_key = secrets.token_urlsafe(32)
        log = Path(folder) / "serve.log"
        command = [
            sys.executable, "-m", "loraplex", "serve", "--model", str(model),
            "--served-model-name", served_name, "--port", str(port),
            "--data-dir", str(Path(folder) / "data"), *arguments,
        ]  # fmt: skip
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("LORAPLEX_") and name not in _PLAIN_SETTINGS
        }
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**environment, **(variables or {}), "LORAPLEX_ADMIN_KEY": admin_key},
            )  # fmt: skip
        service = DemoService(
            f"http://127.0.0.1:{port}", admin_key, Path(folder) / "data", log, process
        )
        try:
            _wait_ready(service)
            yield service
        finally:
            _stop(process)


def free_port() -> int:
    """Return a TCP port of the loopback address that nobody listens on."""
    with listen("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


def _wait_ready(service: DemoService) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if service.process.poll() is not None:
            raise DemoError(f"the service ended while it started:\n{_tail(service.log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{service.url}/health/ready", timeout=2.0).status_code == 200:
                return
        time.sleep(0.2)
    raise DemoError(f"the service was not ready in {START_SECONDS:.0f} s:\n{_tail(service.log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
