"""One API process: `python -m loraplex.api_process LISTENER_FD DRAIN_SECONDS PULSE_FD`.

`serve` starts one or more of them, on one socket. Its settings come on standard input. On SIGTERM
it takes no further connection, lets running requests go on for the drain limit, gives those that
are left a last frame, and ends. A SIGINT after that ends the drain.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn
import uvloop
from litestar import Litestar

from adapter_store.base_model import BaseModel, read_base_model
from adapter_store.blob_url import BlobBucket, open_blob_store
from adapter_store.blobs import BlobStore
from adapter_store.cache.redis_cache import RedisCache
from adapter_store.cache.shared import OneProcess, SharedCache
from adapter_store.references.policy import SourcePolicy
from adapter_store.references.sources import AdapterSources
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from engine.parent import die_with_parent
from engine.text.tokenizer import Tokenizer
from engine.transport.silence import dead_after, doubt_after
from engine.transport.zmq_client import ZmqEngineClient
from loraplex.adapter_cache import fetch_from
from loraplex.app import create_app
from loraplex.drain import answering_when_cut
from loraplex.heartbeats import Heartbeats
from loraplex.http_protocol import bounded_http
from loraplex.limits.shared_rates import open_rates
from loraplex.metrics.port import serving_metrics
from loraplex.services import Backends, Services
from loraplex.settings import Settings, StorageSettings
from loraplex.supervisor.pulse import beat
from loraplex.tracing.choose import open_tracing
from loraplex.tracing.tracing import Tracing

_MAX_OPEN_FILES = 65_536
_LAST_FRAME_SECONDS = 3.0
"""After the drain limit: for the last frames to reach their clients."""
_HURRIED_FRAME_SECONDS = 1.0
"""The same, where the drain was ended before its limit."""


@contextlib.asynccontextmanager
async def open_backends(
    settings: Settings,
    base: BaseModel,
    blobs: BlobStore,
    engine: ZmqEngineClient,
    tracing: Tracing,
) -> AsyncGenerator[Backends]:
    """Open what the app uses, on its event loop."""
    storage = settings.storage
    async with (
        _shared_cache(storage) as shared_cache,
        Heartbeats(
            storage.redis_url, storage.database_url, expected=settings.processes.api_processes
        ) as heartbeats,
        open_rates(
            storage.redis_url, storage.database_url, lambda: heartbeats.num_alive,
            is_away=lambda: shared_cache.is_degraded,
        ) as rates,
    ):  # fmt: skip
        registry = Registry(
            Database(settings.storage.database_url),
            reserved_names=(base.name, *settings.model.served_model_names),
            shared=shared_cache,
        )
        model_dir = Path(settings.engine.model_dir)
        tokenizer = await asyncio.to_thread(Tokenizer.from_pretrained, model_dir)
        await engine.start()
        try:
            yield Backends(
                engine=engine, registry=registry, blobs=blobs, tokenizer=tokenizer,
                base_model=base, shared_cache=shared_cache, sources=_sources(settings),
                rates=rates, heartbeats=heartbeats, tracing=tracing,
            )  # fmt: skip
        finally:
            await engine.close()
            await registry.close()


@contextlib.asynccontextmanager
async def _shared_cache(storage: StorageSettings) -> AsyncGenerator[SharedCache]:
    if storage.redis_url is None:
        yield OneProcess()
        return
    async with RedisCache(storage.redis_url, storage.database_url) as cache:
        yield cache


def _sources(settings: Settings) -> AdapterSources:
    file, blob_url = settings.sources.sources_file, settings.storage.blob_url
    return AdapterSources(
        SourcePolicy() if file is None else SourcePolicy.load(Path(file), os.environ),
        roots=[Path(root) for root in settings.sources.adapter_roots],
        own_bucket=None if blob_url is None else BlobBucket.parse(blob_url).bucket,
    )


class _Drain:
    """The way from the request to stop to the last frame. Signal handlers call its methods."""

    def __init__(self, app: Litestar, engine: ZmqEngineClient, drain_seconds: float) -> None:
        self._app = app
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Let what runs go on for the drain limit, then end it."""
        self._loop.call_soon_threadsafe(self._begin)

    def hurry(self, cut: Callable[[], None]) -> None:
        """End what runs now; a moment later `cut` what still answers."""
        self._loop.call_soon_threadsafe(lambda: self._start(self._hurry(cut)))

    def cancel(self) -> None:
        """All has been answered before its time was over."""
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._loop.create_task(work))

    def _begin(self) -> None:
        self._start(self._cut_streams())
        services: Services | None = self._app.state.get("services")
        if services is not None:
            services.live.stop()  # a page that is open would hold up the stop, and comes back

    async def _cut_streams(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._engine.close()  # what is still running ends with a last frame that says so

    async def _hurry(self, cut: Callable[[], None]) -> None:
        await self._engine.close()
        await asyncio.sleep(_HURRIED_FRAME_SECONDS)
        cut()


class _DrainingServer(uvicorn.Server):
    """uvicorn, with our drain in place of its own leaving at once."""

    def __init__(self, config: uvicorn.Config, drain: _Drain) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self._drain.hurry(self._cut)  # uvicorn would leave at once, without our own clean-up
            return
        if not self.should_exit:
            self._drain.begin()
        super().handle_exit(sig, frame)

    def _cut(self) -> None:
        """Cancel what still answers: it is told that the service stops."""
        for task in tuple(self.server_state.tasks):
            task.cancel()


async def _serve(
    settings: Settings, listener: socket.socket, drain_seconds: float, pulse_fd: int
) -> None:
    pulse = asyncio.create_task(beat(pulse_fd), name="pulse")
    base = await asyncio.to_thread(
        read_base_model, Path(settings.engine.model_dir), name=settings.engine.model_name
    )
    blobs = open_blob_store(settings.storage.blob_url, Path(settings.storage.blobs_dir))
    hang_seconds = settings.engine.hang_seconds
    engine = ZmqEngineClient(
        Path(settings.engine.engine_socket),
        fetch_from(blobs, Path(settings.storage.cache_dir)),
        doubt_after=doubt_after(hang_seconds),
        dead_after=dead_after(hang_seconds),
    )
    tracing = open_tracing(os.environ)
    app = create_app(settings, lambda: open_backends(settings, base, blobs, engine, tracing))
    config = uvicorn.Config(
        answering_when_cut(tracing.wrap(app)),
        http=bounded_http(settings.connections), ws="none", lifespan="on",
        access_log=False, log_config=None, server_header=False,
        timeout_keep_alive=75, timeout_graceful_shutdown=int(drain_seconds + _LAST_FRAME_SECONDS),
    )  # fmt: skip
    # A full collection looks at every object of every module: 80 ms in which no stream moves.
    gc.collect()
    gc.freeze()
    drain = _Drain(app, engine, drain_seconds)
    async with _metrics_port(app, settings):
        await _DrainingServer(config, drain).serve(sockets=[listener])
    await tracing.close()
    drain.cancel()
    pulse.cancel()


@contextlib.asynccontextmanager
async def _metrics_port(app: Litestar, settings: Settings) -> AsyncGenerator[None]:
    fd = settings.metrics.metrics_fd
    if fd is None:
        yield
        return
    with socket.socket(fileno=fd) as listener:
        async with serving_metrics(lambda: app.state.get("metrics_page"), listener):
            yield


def _allow_connections() -> None:
    """Each takes a file descriptor; the usual soft limit of 1024 is kept for users of `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Read the settings and serve until told to stop."""
    die_with_parent()
    _allow_connections()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    listener = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener, float(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
