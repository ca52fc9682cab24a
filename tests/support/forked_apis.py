"""API processes to be killed, quick to start: each is a fork of one that has imported everything.

Each is the whole app with its connections, registry and blobs, on one socket; the engine is a fake.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Generator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvicorn

from adapter_store.blobs import LocalBlobStore
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from engine.text.tokenizer import Tokenizer
from loraplex.app import create_app
from loraplex.services import Backends
from loraplex.settings import AuthSettings, EngineSettings, ModelSettings, Settings, StorageSettings
from tests.support.fake_engine import FakeEngine
from tests.support.service import ADMIN_KEY, BASE
from tests.support.tiny_tokenizers import write_byte_level_folder

FOLDERS = ("blobs", "cache", "uploads", "usage")


@dataclass
class ForkedApis:
    """API processes on one socket, or one fewer for a moment after a kill."""

    root: Path
    database_url: str
    listener: socket.socket
    processes: list[BaseProcess] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def start(self) -> None:
        """Start one more; it answers a moment later."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        process = context.Process(
            target=_serve, args=(self.listener, self.root, self.database_url), daemon=True
        )
        process.start()
        self.processes.append(process)

    def kill(self, index: int) -> None:
        """Kill one, as `kill -9` does."""
        process = self.processes.pop(index)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL, "it had ended by itself"


@contextlib.contextmanager
def forked_apis(root: Path, database_url: str, number: int) -> Generator[ForkedApis]:
    """Processes on a database that has the schema; files lie under `root`."""
    for folder in FOLDERS:
        (root / folder).mkdir(exist_ok=True)
    write_byte_level_folder(root / "tokenizer")
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        apis = ForkedApis(root, database_url, listener)
        try:
            for _ in range(number):
                apis.start()
            yield apis
        finally:
            while apis.processes:
                apis.processes[-1].kill()
                apis.processes.pop().join(10)


def _serve(listener: socket.socket, root: Path, database_url: str) -> None:
    asyncio.run(_run(listener, root, database_url))


async def _run(listener: socket.socket, root: Path, database_url: str) -> None:
    settings = Settings(
        storage=StorageSettings(
            database_url=database_url,
            **{f"{folder}_dir": str(root / folder) for folder in FOLDERS},
        ),
        engine=EngineSettings(engine_socket=str(root / "engine.sock"), model_dir=str(root)),
        auth=AuthSettings(admin_key=ADMIN_KEY),
        model=ModelSettings(served_model_names=("tiny",)),
    )
    backends = Backends(
        engine=FakeEngine(lambda request: [5, 6]),
        registry=Registry(Database(database_url), reserved_names=("tiny",)),
        blobs=LocalBlobStore(root / "blobs"),
        tokenizer=Tokenizer.from_pretrained(root / "tokenizer"),
        base_model=BASE,
    )
    app = create_app(settings, lambda: contextlib.nullcontext(backends))
    config = uvicorn.Config(app, ws="none", lifespan="on", access_log=False, log_config=None)
    await uvicorn.Server(config).serve(sockets=[listener])
