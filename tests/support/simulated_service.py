"""A service in simulated time: tenants, uploads, clients, crashes; a whole engine but its process.

Real are the engine's core, its adapters on disk and in host memory, its fetch desk and residency.
Simulated are the clock, the model (see `memory_engine`), the threads that read adapters, and the
API processes that answer what the engine needs. Every answer is compared with its run alone.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from engine.config import SchedulerConfig
from engine.engine_info import EngineInfo
from engine.errors import AdapterUnavailable, RequestRefused
from engine.messages import EngineRequest, RequestOutput
from engine.parts import AdapterLimits, EngineParts
from engine.scheduled_batch import ScheduledBatch, StepResult
from tests.support.memory_engine import FakeClock
from tests.support.memory_runner import EOS, VOCAB_SIZE, MemoryRunner, expected_output
from tests.support.scripted_engine import put_fake_adapter

CONFIG = SchedulerConfig(
    num_kv_blocks=36, block_size=4, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=80,
    max_loras=3, slot_debt_tokens=60,
)  # fmt: skip
BYTES_OF_ADAPTER = 100
BEAT_SECONDS = 5.0
Key = tuple[str, int]
"""(client, request id)"""


class Weights(str):
    """An adapter in host memory: its digest, with a size."""

    nbytes = BYTES_OF_ADAPTER


class Runner(MemoryRunner):
    """Takes simulated time, and remembers neither batches nor requests."""

    def __init__(self, config: SchedulerConfig, simulation: "Simulation") -> None:
        super().__init__(config)
        self._simulation = simulation

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._simulation.clock.now += self._simulation.step_seconds
        result = super().execute(batch)
        self.batches.clear()
        self._owners.clear()
        return result


class LateThreads:
    """Stands in for a thread pool: what is submitted runs at a later simulated time."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self.is_open = True

    def submit(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        def run() -> None:
            if self.is_open:
                function(*args, **kwargs)

        self._simulation.after(self._simulation.random.choice([0.01, 0.5, 4.0]), run)

    def shutdown(self, **_: bool) -> None:
        self.is_open = False


class Asked(NamedTuple):
    message: EngineRequest
    output: dict[int, list[int]]
    finish: dict[int, str]


class Simulation:
    """Owns the clock, the registry, the blobs and the engine of the moment."""

    def __init__(self, folder: Path, seed: int, *, step_seconds: float) -> None:
        self.clock = FakeClock()
        self.random = Random(seed)
        self.step_seconds = step_seconds
        self.happened = Counter[str]()
        self.live: dict[Key, Asked] = {}
        self.versions: dict[tuple[str, str], str] = {}
        """(tenant, name) -> digest"""
        self.parts: EngineParts
        self.runner: Runner
        self._cache = folder / "cache"
        self._blobs: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = self._num_requests = self._num_uploads = self._num_engines = 0
        self._start_engine()
        self._beat()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        at = self.clock.now + seconds
        heapq.heappush(self._events, (at, self._num_events, action))

    def run_until(self, end: float) -> None:
        """Events and steps in the order of time; sleeps where there is neither."""
        while self.clock.now < end:
            while self._events and self._events[0][0] <= self.clock.now:
                heapq.heappop(self._events)[2]()
            if self.parts.wake.clear() or self.parts.core.has_work:
                self.step()
            elif self._events:
                self.clock.now = min(end, self._events[0][0])
            else:
                self.clock.now = end

    def step(self) -> None:
        preemptions = self.parts.core.stats().preemptions
        for client, output in self.parts.core.step():
            assert isinstance(client, str)
            self._take(client, output)
        self.parts.core.check_integrity()
        self.happened["preempted"] += self.parts.core.stats().preemptions - preemptions
        self._assign()

    # -- the service

    def upload(self, tenant: str, name: str) -> str:
        """A new version under a name, in use or not."""
        self._num_uploads += 1
        digest = f"{self._num_uploads:064x}"
        self._blobs.add(digest)
        self.happened["swap" if (tenant, name) in self.versions else "upload"] += 1
        replaced = self.versions.get((tenant, name))
        self.versions[tenant, name] = digest
        if replaced is not None and self.random.random() < 0.7:  # else it is asked for as name@N
            self._unload(replaced)
        return digest

    def delete(self, tenant: str, name: str) -> None:
        digest = self.versions.pop((tenant, name), None)
        if digest is not None:
            self.happened["delete"] += 1
            self._unload(digest)

    def pin(self, num_pinned: int, num_warm: int) -> None:
        """Some live adapters are to stay; what was is replaced."""
        digests = self.random.sample(
            sorted(self.versions.values()), min(len(self.versions), num_pinned + num_warm)
        )
        self.parts.residency.set(digests[:num_pinned], digests[num_pinned:])
        self.happened["pinned"] += bool(num_pinned and digests)

    def ask(self, client: str, message: EngineRequest) -> Key | None:
        """Queue a request; None if it was refused for a full queue."""
        key = client, message.request_id
        try:
            self.parts.core.add(client, message)
        except RequestRefused as refusal:
            assert refusal.code == "queue_full", refusal.message
            self.happened["refused"] += 1
            return None
        n = range(message.sampling.n)
        self.live[key] = Asked(message, {choice: [] for choice in n}, {})
        return key

    def next_request_id(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def abort(self, key: Key) -> None:
        """Also a request that is over, or was lost with its engine."""
        self.parts.core.abort(*key)
        self.happened["aborted" if self.live.pop(key, None) else "aborted late"] += 1

    def lose_client(self, client: str) -> None:
        """An API process dies, with all its requests and what it was asked to fetch."""
        self.parts.core.abort_client(client)
        self.parts.desk.client_gone(client.encode())
        lost = [key for key in self.live if key[0] == client]
        for key in lost:
            del self.live[key]
        self.happened["client lost"] += bool(lost)

    def crash(self) -> None:
        """The engine dies, and with it all that it had; another one starts on the same disk."""
        self.happened["crash under load"] += bool(self.live)
        self.live.clear()
        self.parts.close()
        self._start_engine()

    # -- what there is

    def counts(self) -> dict[str, int]:
        """Everything of which there must be as much at the end as at the beginning."""
        stats, host = self.parts.core.stats(), self.parts.host
        scheduler = self.parts.core._scheduler
        lifecycle = scheduler._lifecycle
        tenants = lifecycle.waiting.tenants.values()
        self.parts.core.check_integrity()
        host.check_integrity()
        return {
            "requests": sum(map(len, scheduler._requests.values())) + len(self.live),
            "running": stats.running, "waiting": stats.waiting, "blocks": stats.kv_blocks_used,
            "prefix entries": lifecycle.blocks.num_published,
            "copies": len(lifecycle.blocks._pending_copies),
            "slots": stats.slots_used, "slots of the runner": len(self.runner.slots),
            "known adapters": len(lifecycle.slots._adapters),
            "reservations": sum(tenant.has_reservation for tenant in tenants),
            "tenants": len(tenants),
            "queues": sum(len(tenant.queues) for tenant in tenants),
            "listed queues": len(lifecycle.waiting._queues_of),
            "host adapters": host.num_adapters, "host bytes": host.num_bytes,
            "fetches": self.parts.desk.num_open,
            "adapters on disk": sum(1 for _ in self._cache.iterdir()),
        }  # fmt: skip

    # -- private

    def _start_engine(self) -> None:
        self._num_engines += 1
        self.runner = Runner(CONFIG, self)
        info = EngineInfo(
            model="simulated", fingerprint="0" * 64, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS],
            max_model_len=CONFIG.max_model_len, block_size=CONFIG.block_size,
            num_kv_blocks=CONFIG.num_kv_blocks, max_num_seqs=CONFIG.max_num_seqs,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens, max_loras=CONFIG.max_loras,
            max_lora_rank=64, dtype="float32", device="cpu",
        )  # fmt: skip
        limits = AdapterLimits(
            cache_dir=self._cache, max_cpu_loras=4, cpu_lora_bytes=5 * BYTES_OF_ADAPTER,
            disk_lora_bytes=40,
        )  # fmt: skip
        self.parts = EngineParts.assemble(
            self.runner, self._load, config=CONFIG, limits=limits, info=info, clock=self.clock
        )
        self.parts.host._threads.shutdown()
        self.parts.host._threads = LateThreads(self)  # type: ignore[assignment]
        self.runner.core = self.parts.core

    def _load(self, digest: str, folder: Path) -> Weights:
        if self.random.random() < 0.02:
            self.happened["damaged"] += 1
            raise AdapterUnavailable(digest, "its files are damaged")
        if not folder.is_dir():
            raise AdapterUnavailable(digest, "its files are gone")
        self.happened["read"] += 1
        return Weights(digest)

    def _beat(self) -> None:
        """The server's loop comes round now and then, also while nothing happens."""
        self._assign()
        self.after(BEAT_SECONDS, self._beat)

    def _assign(self) -> None:
        for client, digest in self.parts.desk.assign([b"c0", b"c1"]):
            self.after(self.random.choice([0.05, 1.0, 30.0]), self._answer(client, digest))

    def _answer(self, client: bytes, digest: str) -> Callable[[], None]:
        parts = self.parts

        def answer() -> None:
            if parts is not self.parts:
                return  # asked by an engine that is no more
            if digest in self._blobs and self.random.random() < 0.95:
                put_fake_adapter(self._cache, digest)
                parts.desk.close(digest)
                parts.host.have(digest)
            elif parts.desk.is_asked(client, digest):
                parts.desk.close(digest)
                parts.host.fetch_failed(digest, "no such blob")

        return answer

    def _unload(self, digest: str) -> None:
        self._blobs.discard(digest)
        self.parts.core.unload(digest)

    def _take(self, client: str, output: RequestOutput) -> None:
        key = client, output.request_id
        asked = self.live[key]
        for delta in output.deltas:
            assert delta.index not in asked.finish, "a delta after the choice's last one"
            asked.output[delta.index] += delta.token_ids
            if delta.finish_reason is not None:
                asked.finish[delta.index] = delta.finish_reason
        if not output.finished:
            return
        del self.live[key]
        if output.error is not None:
            assert output.error_code == "adapter_unavailable", output.error
            self.happened["adapter unavailable"] += 1
            return
        for choice, tokens in asked.output.items():
            expected = expected_output(asked.message, choice, CONFIG.max_sequence_len)
            assert (tokens, asked.finish[choice]) == expected, "not as alone"
        self.happened["answered"] += 1
        self.happened["cached"] += output.num_cached_tokens > 0
