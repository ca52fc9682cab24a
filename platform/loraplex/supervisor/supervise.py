"""The supervisor's loop: start the engine, the API processes and the recorder, restart what dies,
stop in order.

The listening socket belongs to the supervisor and is inherited by the API processes, so that no
connection is refused while one of them restarts.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from rich.console import Console

from engine.engine_args import EngineArgs
from engine.silence import dead_after
from loraplex.recorder.process import RecorderArgs
from loraplex.settings import MetricsSettings, Settings
from loraplex.supervisor.child import Child

_log = structlog.get_logger("loraplex.supervisor")

_ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
"""OpenMP threads that spin for long fight the API process for the cores: on a busy machine of two
cores a step took 4 to 7 s, and 0.3 s without. Some 20 microseconds, the gap between two parallel
regions, save a sleep at each of a step's 300: 42 ms became 35. The operator's own setting wins."""

_STOP_GRACE_SECONDS = 5.0
"""What an API process gets beyond its drain limit, and the engine once nobody calls it."""


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


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen on a TCP address; port 0 takes a free one. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.set_inheritable(True)
    return listener


async def supervise(service: Service) -> None:
    """Run the service until SIGTERM or SIGINT, then stop it in order; a SIGINT after that ends at
    once what still runs.

    Raises `ChildCannotStart` when a process refuses its settings.
    """
    engine = Child(
        "engine",
        [sys.executable, "-m", "engine.process", "--beat-fd"],
        _engine_payload(service),
        environment=_ENGINE_ENVIRONMENT | os.environ,
        silence_seconds=dead_after(service.engine.hang_seconds),
    )
    api_command = [sys.executable, "-m", "loraplex.api_process"]
    apis = [
        Child(
            f"api-{number}",
            [*api_command, str(service.listener.fileno()), str(service.drain_seconds)],
            _api_payload(service, number),
            pass_fds=[
                s.fileno()
                for s in (service.listener, *service.metrics_listeners[number : number + 1])
            ],
            silence_seconds=service.api_silence_seconds,
        )
        for number in range(service.workers)
    ]
    recorder = Child(
        "recorder", [sys.executable, "-m", "loraplex.recorder.process"], _recorder_payload(service)
    )
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    # A repeated SIGTERM is no hurry: `timeout` and some init systems send it twice.
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: (hurry if stop.is_set() else stop).set())
    running = {
        child: asyncio.create_task(child.run(), name=child.name)
        for child in (engine, *apis, recorder)
    }
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([stopped, *running.values()], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if stop.is_set():  # else a process has just said why it cannot start: the last word
            _tell_stop(service.drain_seconds)
        service.listener.close()  # from now on a connection is refused: not ready at once
        # The engine goes last: the streams that drain need it, and what it did is read after them.
        grace = service.drain_seconds + _STOP_GRACE_SECONDS
        await _stop([(api, running[api]) for api in apis], grace, hurry)
        await _stop([(recorder, running[recorder])], _STOP_GRACE_SECONDS)
        await _stop([(engine, running[engine])], _STOP_GRACE_SECONDS)
    for task in running.values():
        task.result()


def _engine_payload(service: Service) -> Callable[[int], bytes]:
    def payload(generation: int) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(service.engine, generation=generation))

    return payload


def _recorder_payload(service: Service) -> Callable[[int], bytes]:
    args = RecorderArgs(
        database_url=service.api.storage.database_url,
        engine_socket=service.engine.socket_path,
        run=secrets.token_hex(8),
    )

    def payload(_: int) -> bytes:
        return msgspec.json.encode(args)

    return payload


def _api_payload(service: Service, number: int) -> Callable[[int], bytes]:
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


def _tell_stop(drain_seconds: float) -> None:
    """In a terminal a sentence, elsewhere a line of the log."""
    console = Console(stderr=True)
    if not console.is_terminal:
        _log.info("stopping", drain_seconds=drain_seconds)
    else:
        console.print(
            f"\nStopping: what runs may go on for {drain_seconds:g} s; "
            "Ctrl-C again ends it at once.",
            highlight=False,
        )


async def _stop(
    children: list[tuple[Child, asyncio.Task[None]]],
    grace: float,
    hurry: asyncio.Event | None = None,
) -> None:
    """Signal the children, wait, kill those that are still there, and wait for those too.

    With `hurry` the wait is over when that is set: what the children have is ended then.
    """
    for child, _ in children:
        child.signal_stop()
    tasks = [task for _, task in children]
    hurrying = None if hurry is None else asyncio.create_task(_end_at_once(children, hurry))
    await asyncio.wait(tasks, timeout=grace)
    if hurrying is not None:
        hurrying.cancel()
    for child, task in children:
        if not task.done():
            _log.warning("killing", child=child.name, after_seconds=grace)
            child.kill()
    with contextlib.suppress(Exception):  # `supervise` reports what a child raised
        await asyncio.gather(*tasks)


async def _end_at_once(
    children: list[tuple[Child, asyncio.Task[None]]], hurry: asyncio.Event
) -> None:
    """When `hurry` is set, have the children end what they have, and kill those that do not."""
    await hurry.wait()
    _log.info("stopping_at_once")
    for child, _ in children:
        child.signal_hurry()
    await asyncio.sleep(_STOP_GRACE_SECONDS)
    for child, task in children:
        if not task.done():
            _log.warning("killing", child=child.name, after_seconds=_STOP_GRACE_SECONDS)
            child.kill()
