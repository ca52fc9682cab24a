"""The service on a loop of its own thread, for tests that call it without `await`."""

import asyncio
import contextlib
import threading
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.support.service import TestService, running_service


@contextlib.contextmanager
def threaded_service(root: Path, engine: Any = None, **options: Any) -> Generator[TestService]:
    """As `running_service`, whose registry and engine are then the other thread's."""
    started: Future[TestService] = Future()
    stop = threading.Event()

    async def serve() -> None:
        async with running_service(root, engine, **options) as service:
            started.set_result(service)
            await asyncio.to_thread(stop.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="service")
    thread.start()
    try:
        yield started.result(60)
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
