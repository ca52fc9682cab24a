"""What a new engine loads before it counts as ready, and how long that may take."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.adapters.disk import AdapterDisk
from engine.adapters.host import AdapterHost
from engine.adapters.residency import Residency
from engine.config import SchedulerConfig
from engine.core import EngineCore
from tests.support.memory_engine import FakeClock
from tests.support.scripted_engine import (
    EOS,
    VOCAB_SIZE,
    FakeWeights,
    ScriptedRunner,
    digest_of,
    load_fake_adapter,
    put_fake_adapter,
    request,
)
from tests.support.waiting import SECONDS

A, B, C, D = (digest_of(number) for number in (10, 11, 12, 13))


class Bench:
    """A core, its host and their residency, driven by hand."""

    def __init__(self, cache_dir: Path, *, max_loras: int = 2, broken: str | None = None) -> None:
        self.clock = FakeClock()
        self.runner = ScriptedRunner()
        self.needed: list[str] = []
        self.cache_dir = cache_dir

        def load(digest: str, folder: Path) -> FakeWeights:
            if digest == broken:
                raise ValueError("it is broken")
            return load_fake_adapter(digest, folder)

        self.host = AdapterHost(
            cache_dir, load, need=self.needed.append, max_cpu_loras=3, cpu_lora_bytes=10**6,
            disk_lora_bytes=10**6,
        )  # fmt: skip
        self.core = EngineCore(
            SchedulerConfig(
                num_kv_blocks=4096, max_num_seqs=2, max_loras=max_loras, max_model_len=65536
            ),
            self.runner, self.host, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE, clock=self.clock,
        )  # fmt: skip
        self.residency = Residency(
            self.core, self.host, max_pinned=max_loras - 1, num_recent=2, warm_up_seconds=5,
            clock=self.clock,
        )  # fmt: skip

    @property
    def resident(self) -> set[str]:
        return {weights.digest for weights in self.runner.slots.values()}

    def settle(self) -> None:
        """Step until nothing is on its way any more that lies on disk."""
        deadline = time.monotonic() + SECONDS
        while any(self.host.is_coming(d) for d in (A, B, C, D) if d not in self.needed):
            assert time.monotonic() < deadline
            self.core.step()
        for _ in range(3):
            self.core.step()
        self.core.check_integrity()
        self.host.check_integrity()

    def deliver(self, digest: str) -> None:
        self.needed.remove(digest)
        put_fake_adapter(self.cache_dir, digest)
        self.host.have(digest)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.host.close()


def test_an_engine_is_warm_when_pinned_and_warm_adapters_are_where_they_belong(bench: Bench):
    assert bench.residency.is_warming  # nobody has said yet what to keep
    bench.residency.set([A], [B])
    for digest in (B, A):
        assert bench.residency.is_warming
        bench.deliver(digest)
        bench.settle()
    assert not bench.residency.is_warming
    assert bench.resident == {A} and bench.host.has(B)
    bench.residency.set([C], [D])
    assert not bench.residency.is_warming, "it is new only once"


def test_an_engine_with_nothing_to_keep_is_warm_once_it_was_told(bench: Bench):
    assert bench.residency.is_warming
    bench.residency.set([], [])
    assert not bench.residency.is_warming


def test_what_was_used_last_is_read_ahead_once(tmp_path: Path):
    for digest in (A, B, C):
        put_fake_adapter(tmp_path, digest)
        AdapterDisk(tmp_path, max_bytes=10**6).touch(digest)
    bench = Bench(tmp_path)
    assert bench.host.recent == [C, B, A]
    bench.residency.set([], [], recent=bench.host.recent)  # more than it reads ahead
    assert bench.residency.is_warming
    bench.settle()
    assert not bench.residency.is_warming
    assert [bench.host.has(digest) for digest in (A, B, C)] == [False, True, True]
    bench.residency.set([], [], recent=[A])
    assert not bench.host.is_coming(A)
    bench.host.close()


def test_a_request_need_not_wait_for_what_is_read_ahead(tmp_path: Path):
    go_on, reads = threading.Event(), list[str]()

    def load(digest: str, folder: Path) -> FakeWeights:
        reads.append(digest)
        assert go_on.wait(SECONDS)
        return load_fake_adapter(digest, folder)

    for digest in (A, B, C, D):
        put_fake_adapter(tmp_path, digest)
    host = AdapterHost(
        tmp_path, load, need=lambda digest: None, max_cpu_loras=8, cpu_lora_bytes=10**6,
        disk_lora_bytes=10**6,
    )  # fmt: skip
    host.read_ahead([A, B, C])
    host.prefetch(D)
    assert host.is_coming(C) and host.num_adapters == 3, "D is to be read, and C not yet"
    go_on.set()
    while not all(map(host.has, (A, B, C, D))):
        host.poll()
        host.check_integrity()
    assert set(reads[:2]) == {A, B} and set(reads[2:]) == {C, D}
    host.close()


def test_an_adapter_that_cannot_be_had_does_not_keep_the_engine_unready(tmp_path: Path):
    bench = Bench(tmp_path, broken=A)
    bench.residency.set([A], [B])
    bench.deliver(A)
    bench.settle()
    bench.deliver(A)  # damaged files are asked for once more
    bench.settle()
    assert bench.residency.is_warming and bench.needed == [B]
    bench.clock.now = 4.9
    assert bench.residency.is_warming
    bench.clock.now = 5.0
    assert not bench.residency.is_warming  # B is still not there
    bench.clock.now = 0.0
    assert not bench.residency.is_warming
    bench.host.close()


def test_more_pins_than_slots_can_take_are_kept_warm_and_odd_names_are_dropped(bench: Bench):
    bench.residency.set([A, B, A, "../x"], [B, C])
    assert (bench.residency.pinned, bench.residency.warm) == ((A,), (B, C))
    assert bench.host.kept == {B, C} and sorted(bench.needed) == [A, B, C]


def test_a_pin_that_moved_leaves_its_old_version_to_those_that_still_run_on_it(bench: Bench):
    bench.runner.reply = lambda prompt, adapter: [7] * 10**6
    bench.residency.set([A], [])
    bench.deliver(A)
    bench.settle()
    bench.core.add("me", request(1, [5], adapter=A, max_tokens=50_000))
    bench.core.step()
    bench.residency.set([B], [])
    bench.deliver(B)
    bench.settle()
    bench.core.unload(A)
    bench.core.step()
    assert bench.resident == {A, B} and bench.core.stats().running == 1
    bench.core.abort("me", 1)
    bench.core.step()
    assert bench.resident == {B} and not bench.host.has(A)
