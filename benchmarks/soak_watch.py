"""What `benchmarks.soak` looks at: counts that must come back, and memory that must stay flat."""

import asyncio
import contextlib
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from loraplex.demo.service import DemoService

MODULES = {"engine": "engine.process", "api": "loraplex.api_process"}
WARM_UP_SECONDS = 45.0
"""After a process was first seen at work: it makes threads, meets its longest batches."""
MIN_SECONDS = 60.0
"""Of the life after that, or nothing can be said of it."""
MAX_GROWTH_MIB = 12.0
"""From the first third of a process's life to the last: what allocators keep, and the engine's
records of its last steps and requests, which are as many as they may be after about ten minutes."""
KEEP_ALIVE_SECONDS = 6.0
"""More than httpx keeps a connection that is idle."""
_KINDS = {"socket": "sockets", "pipe": "pipes", "anon_inode": "others"}
_AT_REST = ("running", "waiting", "kv_blocks_used", "slots_used", "host_adapters")


def child(service: DemoService, name: str) -> psutil.Process:
    """The engine's or the API's process as it is now; raises `LookupError` between two lives."""
    for process in psutil.Process(service.process.pid).children():
        if MODULES[name] in process.cmdline():
            return process
    raise LookupError(name)


@dataclass(frozen=True)
class Memory:
    """One life of one process, warm, in MiB."""

    name: str
    samples: list[float]

    @property
    def first(self) -> float:
        return median(self.samples[: max(1, len(self.samples) // 3)])

    @property
    def last(self) -> float:
        return median(self.samples[-max(1, len(self.samples) // 3) :])

    @property
    def is_flat(self) -> bool:
        return self.last - self.first <= MAX_GROWTH_MIB


@dataclass
class Watch:
    """Samples of every process of the service, and the sums of what engines counted."""

    service: DemoService
    http: httpx.AsyncClient
    totals: dict[str, int] = field(default_factory=dict)
    _samples: dict[tuple[str, int], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(Seconds since the first of them, MiB) by process."""
    _began: dict[tuple[str, int], float] = field(default_factory=dict)
    _lives: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def memories(self) -> list[Memory]:
        """Of every life that was at work for long enough to tell."""
        return [
            Memory(f"{name} {pid}", [mib for age, mib in samples if age >= WARM_UP_SECONDS])
            for (name, pid), samples in self._samples.items()
            if samples[-1][0] >= WARM_UP_SECONDS + MIN_SECONDS
        ]

    def totals_of(self, name: str) -> int:
        """A counter of the engine, over all its lives."""
        return sum(life[name] for life in self._lives.values())

    async def sample_for_ever(self, seconds: float) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(seconds)

    async def sample(self) -> None:
        self._sample_memory("supervisor", psutil.Process(self.service.process.pid))
        for name in MODULES:
            try:
                process = child(self.service, name)
                if name == "engine":
                    if (stats := await self.engine_stats()) is None:
                        continue  # It loads, for however long that takes.
                    counters = ("steps", "output_tokens", "cached_tokens", "preemptions")
                    self._lives[process.pid] = {key: stats[key] for key in counters}
                self._sample_memory(name, process)
            except (LookupError, psutil.Error):
                continue

    def _sample_memory(self, name: str, process: psutil.Process) -> None:
        life, now = (name, process.pid), time.monotonic()
        seconds = now - self._began.setdefault(life, now)
        self._samples[life].append((seconds, process.memory_info().rss / 2**20))

    async def engine_stats(self) -> dict[str, Any] | None:
        """A snapshot of the engine; None while it is not there."""
        headers = {"authorization": f"Bearer {self.service.admin_key}"}
        reply = await self.http.get("/admin/engine", headers=headers)
        return reply.json() if reply.status_code == 200 else None

    async def counts(self) -> dict[str, int]:
        """Everything that must be the same before and after."""
        stats = await self.engine_stats() or {}
        counts = {name: stats.get(name, -1) for name in (*_AT_REST, "host_adapter_bytes")}
        for folder in ("blobs", "cache", "uploads"):
            weights = (self.service.data_dir / folder).rglob("*.safetensors")
            counts[f"adapters in {folder}"] = sum(1 for _ in weights)
        for name in MODULES:
            for kind, number in _descriptors(child(self.service, name)).items():
                counts[f"{name}: {kind}"] = number
        return counts

    async def counts_at_rest(
        self, expected: dict[str, int] | None, seconds: float
    ) -> dict[str, int]:
        """Counts once they are as expected, or when time is over.

        None: once nothing is in use, and nothing has changed for as long as the client's idle
        connections live.
        """
        now = asyncio.get_running_loop().time
        deadline, counts, since = now() + seconds, await self.counts(), now()
        while now() < deadline:
            if counts == expected:
                break
            is_idle = not any(counts[name] for name in _AT_REST)
            if expected is None and is_idle and now() > since + KEEP_ALIVE_SECONDS:
                break
            await asyncio.sleep(0.5)
            before, counts = counts, await self.counts()
            since = since if counts == before else now()
        return counts


def _descriptors(process: psutil.Process) -> dict[str, int]:
    """Open descriptors by kind, as Linux tells them. The registry's own connections do not count:
    its pool keeps as many as were needed at once.
    """
    kinds = Counter({"sockets": 0, "pipes": 0, "files": 0, "others": 0})
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            if "registry.db" not in target:
                kinds[_KINDS.get(target.partition(":")[0], "files")] += 1
    return dict(kinds)
