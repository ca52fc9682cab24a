"""What an upload and a load consist of, each part alone: the service's own functions, called here.

Upload: the files are inspected (header, names, every value, digest), then put into the blob store
(copied, synced, hashed). Load: fetched from there (copied, hashed), then inspected again and packed
for the kernels. What the service's times have above these is HTTP, SQL, messages between processes,
and waiting for a core.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from adapter_store.blobs import LocalBlobStore
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE, hash_files
from adapter_store.peft_format import inspect_adapter
from benchmarks.serving.figures import markdown, percentile
from engine.runner.build_runner import build_runner

T = TypeVar("T")
PARTS = {
    "inspect": "inspect it, at its upload and at each load",
    "hash": "of this: its digest",
    "put": "put it into the blob store",
    "fetch": "fetch it from there",
    "load": "load it: inspect and pack",
}


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of one part, one value an adapter."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])


def time_parts(model: Path, folders: Sequence[Path], scratch: Path) -> dict[str, PartTimes]:
    """Run every part on every adapter, one after the other, in `scratch`; keys as in `PARTS`."""
    built = build_runner(model, num_kv_blocks=64, self_test=False)
    store = LocalBlobStore(scratch / "blobs")
    times = {part: PartTimes() for part in PARTS}

    def timed(part: str, work: Callable[[], T]) -> T:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        times[part].wall.append(time.perf_counter() - wall)
        times[part].cpu.append(time.process_time() - cpu)
        return result

    with ThreadPoolExecutor(1) as reader:  # as in the engine: the load's thread has no team
        for folder in folders:
            config, weights = (folder / CONFIG_FILE).read_bytes(), folder / WEIGHTS_FILE
            inspected = timed(
                "inspect",
                lambda c=config, w=weights: inspect_adapter(
                    c, w, built.base, max_rank=built.max_lora_rank
                ),
            )
            digest = inspected.digest
            cached = scratch / "cache" / digest
            timed("hash", lambda c=config, w=weights: hash_files(c, w))
            timed("put", lambda d=digest, c=config, w=weights: asyncio.run(store.put(d, c, w)))
            timed("fetch", lambda d=digest, into=cached: asyncio.run(store.fetch(d, into)))
            timed(
                "load",
                lambda d=digest, f=cached: reader.submit(built.load_adapter, d, f).result(),
            )
    return times


def parts_table(times: dict[str, PartTimes]) -> str:
    """One row a part."""
    rows = [
        [PARTS[part], *_figures(spent.wall), f"{1e3 * percentile(spent.cpu, 0.5):.1f}"]
        for part, spent in times.items()
    ]
    return markdown(("ms, each part alone", "p50", "p90", "max", "CPU p50"), rows)


def _figures(seconds: Sequence[float]) -> list[str]:
    values = (percentile(seconds, 0.5), percentile(seconds, 0.9), max(seconds))
    return [f"{1e3 * value:.1f}" for value in values]
