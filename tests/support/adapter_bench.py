"""An `AdapterHost` on a bench: what it asked for, held reads, and a way to wait for its threads."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from engine.adapters.host import AdapterHost
from engine.adapters.source import AdapterEvent
from tests.support.scripted_engine import FakeWeights, load_fake_adapter, put_fake_adapter


class HostBench:
    """A host, what it asked for, and a way to wait for its threads."""

    def __init__(self, cache_dir: Path, *, max_cpu_loras: int = 8, **limits: int) -> None:
        self.cache_dir = cache_dir
        self.needed: list[str] = []
        self.reads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.woken = threading.Event()
        self.host = AdapterHost(
            cache_dir,
            self._load,
            need=self.needed.append,
            max_cpu_loras=max_cpu_loras,
            cpu_lora_bytes=limits.get("cpu_lora_bytes", 10**9),
            disk_lora_bytes=limits.get("disk_lora_bytes", 10**9),
            wake=self.woken.set,
        )

    def _load(self, digest: str, folder: Path) -> FakeWeights:
        assert self.gate.wait(10)
        self.reads.append(digest)
        return load_fake_adapter(digest, folder)

    def put(self, digest: str, content: bytes = b"weights") -> None:
        put_fake_adapter(self.cache_dir, digest, content)

    def events(self, at_least: int) -> list[AdapterEvent]:
        """Poll until so many events have come."""
        events: list[AdapterEvent] = []
        while True:
            self.woken.clear()
            events += self.host.poll()
            self.host.check_integrity()
            if len(events) >= at_least:
                return events
            assert self.woken.wait(10), f"only {events}"

    def bring(self, *digests: str) -> None:
        """Have adapters in memory, wanted."""
        for digest in digests:
            self.put(digest)
            self.host.prefetch(digest)
        self.events(len(digests))


@contextlib.contextmanager
def host_bench(cache_dir: Path, **limits: int) -> Iterator[HostBench]:
    made = HostBench(cache_dir, **limits)
    try:
        yield made
    finally:
        made.gate.set()
        made.host.close()
