"""Whoever watches a service while it works: open dashboards and a Prometheus, on a thread."""

import asyncio
import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, field

import httpx

NUM_READERS = 3
SCRAPE_SECONDS = 5.0


@dataclass(slots=True)
class Seen:
    """What came to the watchers, to show that they watched."""

    events: int = 0
    pages: int = 0
    page_bytes: int = 0
    errors: list[str] = field(default_factory=list[str])
    watchers: int = 0
    """How many have seen something."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set once all have, or one has failed."""

    def begun(self) -> None:
        """One more watcher has seen something."""
        self.watchers += 1
        if self.watchers == NUM_READERS + 1:
            self.ready.set()


@contextlib.contextmanager
def watching(url: str, key: str) -> Generator[Seen]:
    """Read `NUM_READERS` event streams, and the metrics every `SCRAPE_SECONDS`, while in the block.

    `key` is an admin's.
    """
    seen = Seen()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_watch(url, key, seen, stop)))
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


async def _watch(url: str, key: str, seen: Seen, stop: threading.Event) -> None:
    limits = httpx.Limits(max_connections=NUM_READERS + 2)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits, trust_env=False) as http:
        tasks = [asyncio.create_task(_read_events(http, key, seen)) for _ in range(NUM_READERS)]
        tasks.append(asyncio.create_task(_scrape(http, key, seen)))
        waiting = asyncio.create_task(asyncio.to_thread(stop.wait))
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        seen.ready.set()
        await waiting
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                seen.errors.append(repr(outcome))


async def _read_events(http: httpx.AsyncClient, key: str, seen: Seen) -> None:
    origin = str(http.base_url).rstrip("/")
    login = await http.post("/dashboard/api/session", json={"key": key}, headers={"origin": origin})
    login.raise_for_status()
    async with http.stream("GET", "/dashboard/api/events", timeout=None) as stream:
        stream.raise_for_status()
        events = 0
        async for line in stream.aiter_lines():
            if line.startswith("data:"):
                events += 1
                seen.events += 1
                if events == 1:
                    seen.begun()


async def _scrape(http: httpx.AsyncClient, key: str, seen: Seen) -> None:
    while True:
        page = await http.get("/metrics", headers={"authorization": f"Bearer {key}"})
        page.raise_for_status()
        seen.pages += 1
        if seen.pages == 1:
            seen.begun()
        seen.page_bytes = len(page.content)
        await asyncio.sleep(SCRAPE_SECONDS)
