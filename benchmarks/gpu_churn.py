"""What loading adapters beside the steps does to the gaps between tokens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_decode import Bench
from benchmarks.gpu_model import install, packed, random_adapter
from engine.device.adapter_transfers import AdapterTransfers

LOAD_EVERY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Gaps:
    """Microseconds between the tokens of a row."""

    median: float
    p99: float


def token_gaps(bench: Bench, batch: int, rank: int, steps: int) -> tuple[Gaps, Gaps, int]:
    """Without loads, with them, and how many there were.

    Half of the slots have rows, the others take one adapter after the other from pinned memory.
    """
    num_slots = bench.setup.max_loras
    used = max(1, num_slots // 2)
    bench.fill_slots(used, rank)
    adapter = random_adapter(bench.shape, rank, dtype=bench.dtype, device=bench.device, seed=2)
    there = packed(adapter, lambda values: bench.setup.device.pin(values.cpu()))
    spare = range(used, num_slots)
    calm = _run(bench, batch, used, steps)
    with _transfers(bench) as transfers:
        busy, installed = _run_with_loads(bench, batch, used, steps, transfers, there, spare)
    return calm, busy, installed


@contextmanager
def _transfers(bench: Bench) -> Iterator[AdapterTransfers]:
    def clear(slot: int) -> None:
        install(bench.decoder, slot, {})

    transfers = AdapterTransfers(
        bench.setup.device, lambda slot, weights: install(bench.decoder, slot, weights), clear
    )
    try:
        yield transfers
    finally:
        transfers.close()


def _run(bench: Bench, batch: int, adapters: int, steps: int) -> Gaps:
    return _gaps([_step(bench, batch, adapters) for _ in range(steps + 1)])


def _run_with_loads(
    bench: Bench,
    batch: int,
    adapters: int,
    steps: int,
    transfers: AdapterTransfers,
    weights: Any,
    spare: range,
) -> tuple[Gaps, int]:
    ends: list[float] = []
    count, under_way, next_load = 0, None, 0.0
    for _ in range(steps + 1):
        if spare and (under_way is None or under_way.is_done()) and time.perf_counter() > next_load:
            if under_way is not None and (error := under_way.error()) is not None:
                raise RuntimeError(f"a load failed: {error}")
            under_way = transfers.install(spare[count % len(spare)], weights)
            next_load = time.perf_counter() + LOAD_EVERY_SECONDS
            count += 1
        ends.append(_step(bench, batch, adapters))
    return _gaps(ends), count


@torch.inference_mode()
def _step(bench: Bench, batch: int, adapters: int) -> float:
    """One decode step, its tokens back on the host; when it was over."""
    rows = bench.decode_rows(batch, adapters, bench.context - 1)
    bench.graphed(rows).argmax(-1).tolist()
    return time.perf_counter()


def _gaps(ends: list[float]) -> Gaps:
    gaps = 1e6 * np.diff(np.array(ends))
    return Gaps(float(np.median(gaps)), float(np.quantile(gaps, 0.99)))
