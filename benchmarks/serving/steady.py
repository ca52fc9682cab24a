"""Load that goes on without end, while what serves it is measured window by window."""

import asyncio
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from benchmarks.serving.load import Call, client, complete, read_workload
from benchmarks.serving.ours import OurService


@dataclass(frozen=True, slots=True)
class Window:
    """CPU seconds an output token of a service's processes over a window; `other` is all but
    the engine's and the API's."""

    engine: float
    api: float
    other: float

    @property
    def whole(self) -> float:
        """Of all processes."""
        return self.engine + self.api + self.other


def window(service: OurService, seconds: float) -> Window:
    """What the service uses in the next `seconds`."""
    usage, cpu = service.usage(), service.cpu_seconds()
    time.sleep(seconds)
    usage, cpu = service.usage() - usage, service.cpu_seconds() - cpu
    tokens = usage.output_tokens
    engine, api = usage.engine_cpu_seconds, usage.api_cpu_seconds
    return Window(engine / tokens, api / tokens, (cpu - engine - api) / tokens)


@contextmanager
def steady_load(
    service: OurService, mix: str, *, concurrency: int = 32, seed: int = 0
) -> Generator[None]:
    """Keep `concurrency` calls of a mix in the service while in the block.

    Each pass through the workload has an order of its own, so that no window is like the one that
    lies a fixed time before. What is under way at the end is waited for. Raises LoadError at the
    end if a reply was not what was asked for.
    """
    stop = threading.Event()
    calls = _without_end(read_workload(mix), Random(seed))
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(asyncio.run, _closed_loop(service, calls, concurrency, stop))
        try:
            yield
        finally:
            stop.set()
            load.result()


def _without_end(workload: Sequence[Call], random: Random) -> Iterator[Call]:
    while True:
        yield from random.sample(workload, len(workload))


async def _closed_loop(
    service: OurService, calls: Iterator[Call], concurrency: int, stop: threading.Event
) -> None:
    async with client(service.url, service.key) as http, asyncio.TaskGroup() as group:

        async def worker() -> None:
            while not stop.is_set():
                await complete(http, next(calls))

        for _ in range(concurrency):
            group.create_task(worker())
