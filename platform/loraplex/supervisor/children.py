"""The processes of a service: which command each runs, and what it reads on standard input."""

import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.engine_args import EngineArgs
from engine.transport.silence import dead_after
from loraplex.recorder.process import RecorderArgs
from loraplex.settings import MetricsSettings, Settings
from loraplex.supervisor.child import Child

_ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
"""OpenMP threads that spin for long fight the API process for the cores: on a busy machine of two
cores a step took 4 to 7 s, and 0.3 s without. Some 20 microseconds, the gap between two parallel
regions, save a sleep at each of a step's 300: 42 ms became 35. The operator's own setting wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the supervisor runs."""

    engine: EngineArgs
    """Arguments of the engine's first start."""
    api: Settings
    listener: socket.socket
    """Bound and listening; its file descriptor goes to every API process."""
    metrics_listeners: tuple[socket.socket, ...] = ()
    """On loopback, one an API process, for `/metrics` without a key; or none."""
    workers: int = 1
    drain_seconds: float = 30.0
    api_silence_seconds: float = 10.0
    """An API process whose event loop stands still for so long is killed, and started again."""


def engine_child(service: Service) -> Child:
    """The one engine, told which start of it this is."""

    def payload(generation: int) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(service.engine, generation=generation))

    return Child(
        "engine",
        [sys.executable, "-m", "engine.process", "--beat-fd"],
        payload,
        environment=_ENGINE_ENVIRONMENT | os.environ,
        silence_seconds=dead_after(service.engine.hang_seconds),
    )


def api_children(service: Service) -> list[Child]:
    """`service.workers` API processes, which all accept connections on the one listener."""
    command = [sys.executable, "-m", "loraplex.api_process"]
    return [
        Child(
            f"api-{number}",
            [*command, str(service.listener.fileno()), str(service.drain_seconds)],
            api_payload(service, number),
            pass_fds=[
                listener.fileno()
                for listener in (service.listener, *service.metrics_listeners[number : number + 1])
            ],
            silence_seconds=service.api_silence_seconds,
        )
        for number in range(service.workers)
    ]


def api_payload(service: Service, number: int) -> Callable[[int], bytes]:
    """Settings with a folder for uploads of its own, which is emptied at each start: what a killed
    process had received is of no use to the next."""
    uploads = Path(service.api.storage.uploads_dir) / f"api-{number}"
    storage = msgspec.structs.replace(service.api.storage, uploads_dir=str(uploads))
    engine = msgspec.structs.replace(service.api.engine, hang_seconds=service.engine.hang_seconds)
    settings = msgspec.structs.replace(service.api, storage=storage, engine=engine)
    if service.metrics_listeners:
        fd = service.metrics_listeners[number].fileno()
        settings = msgspec.structs.replace(settings, metrics=MetricsSettings(metrics_fd=fd))
    document = msgspec.json.encode(settings)

    def payload(_: int) -> bytes:
        shutil.rmtree(uploads, ignore_errors=True)
        uploads.mkdir(parents=True, exist_ok=True, mode=0o700)
        return document

    return payload


def recorder_child(service: Service) -> Child:
    """The process that writes the dashboard's figures to the database."""
    document = msgspec.json.encode(
        RecorderArgs(
            database_url=service.api.storage.database_url,
            engine_socket=service.engine.socket_path,
            run=secrets.token_hex(8),
        )
    )
    return Child(
        "recorder", [sys.executable, "-m", "loraplex.recorder.process"], lambda _: document
    )
