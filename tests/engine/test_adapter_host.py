"""The host tier: one fetch for many requests, bounded memory and disk, failures told once."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.adapter_disk import AdapterDisk
from engine.adapter_host import AdapterHost
from engine.adapter_source import AdapterEvent, AdapterFailed, AdapterReady
from tests.support.scripted_engine import (
    FakeWeights,
    digest_of,
    load_fake_adapter,
    put_fake_adapter,
)

A, B, C, D = (digest_of(number) for number in (10, 11, 12, 13))


class Bench:
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
def bench(cache_dir: Path, **limits: int) -> Iterator[Bench]:
    made = Bench(cache_dir, **limits)
    try:
        yield made
    finally:
        made.gate.set()
        made.host.close()


def test_a_hundred_prefetches_of_a_cold_adapter_are_one_need_and_one_read(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        for _ in range(100):
            b.host.prefetch(A)
        assert b.needed == [A]
        assert b.host.poll() == [] and b.host.get(A) is None
        b.put(A)
        b.host.have(A)
        b.host.have(A)
        [event] = b.events(1)
        assert isinstance(event, AdapterReady) and event.digest == A and event.seconds >= 0
        assert b.reads == [A]
        weights = b.host.get(A)
        assert weights is not None and weights.nbytes == b.host.num_bytes == 9


def test_what_lies_on_disk_is_read_without_asking_anybody(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.put(A)
        b.host.prefetch(A)
        assert isinstance(b.events(1)[0], AdapterReady)
        assert b.needed == []


def test_a_prefetch_of_a_ready_adapter_is_answered_too(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.bring(A)
        b.host.prefetch(A)
        assert b.host.poll() == [AdapterReady(A, 0.0)]
        assert b.reads == [A]


def test_poll_does_not_wait_for_a_read(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.gate.clear()
        b.put(A)
        b.host.prefetch(A)
        assert b.host.poll() == []
        assert b.host.get(A) is None
        b.gate.set()
        assert b.events(1)


def test_a_failed_fetch_is_told_once_and_the_next_prefetch_asks_again(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.host.prefetch(A)
        b.host.fetch_failed(A, "no such blob")
        b.host.fetch_failed(A, "no such blob")
        assert b.host.poll() == [AdapterFailed(A, "no such blob")]
        b.host.prefetch(A)
        assert b.needed == [A, A]
        b.put(A)
        b.host.have(A)
        assert isinstance(b.events(1)[0], AdapterReady)


def test_damaged_files_are_removed_and_needed_again_once(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.put(A, b"damaged")
        b.host.prefetch(A)
        while not b.needed:  # the read has failed
            assert b.woken.wait(10)
            b.woken.clear()
            assert b.host.poll() == []
        assert b.needed == [A]
        assert not (tmp_path / A).exists()
        b.put(A)
        b.host.have(A)
        assert isinstance(b.events(1)[0], AdapterReady)


def test_files_damaged_twice_fail_the_adapter(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.put(A, b"damaged")
        b.host.prefetch(A)
        while not b.needed:
            assert b.woken.wait(10)
            b.woken.clear()
            b.host.poll()
        b.put(A, b"damaged")
        b.host.have(A)
        [event] = b.events(1)
        assert isinstance(event, AdapterFailed) and "damaged" in event.reason
        assert b.needed == [A]
        assert b.host.num_adapters == 0 and b.host.num_bytes == 0


@pytest.mark.parametrize("error", [MemoryError, type("PanicException", (BaseException,), {})])
def test_whatever_a_read_raises_fails_the_adapter_and_no_request_waits_for_ever(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def load(digest: str, folder: Path) -> FakeWeights:
        raise error

    woken = threading.Event()
    host = AdapterHost(
        tmp_path, load, need=lambda digest: put_fake_adapter(tmp_path, digest, b"again"),
        max_cpu_loras=1, cpu_lora_bytes=10**9, disk_lora_bytes=10**9, wake=woken.set,
    )  # fmt: skip
    put_fake_adapter(tmp_path, A, b"weights")
    host.prefetch(A)
    events: list[AdapterEvent] = []
    while not events:
        assert woken.wait(10), "the read was lost"
        woken.clear()
        events = host.poll()
        host.have(A)
    assert events == [AdapterFailed(A, error.__name__)]
    assert host.num_adapters == 0
    host.close()


def test_a_have_without_files_is_asked_for_once_more_then_fails(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.host.prefetch(A)
        b.host.have(A)
        assert b.needed == [A, A]
        b.host.have(A)
        [event] = b.events(1)
        assert isinstance(event, AdapterFailed) and "missing" in event.reason


def test_a_disk_that_fails_fails_its_adapter_and_nothing_else(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        loop = tmp_path / A
        loop.symlink_to(loop)  # every access ends with ELOOP, also for root
        b.host.prefetch(A)
        assert b.needed == [A]
        for _ in range(2):
            b.host.have(A)
        [event] = b.events(1)
        assert isinstance(event, AdapterFailed) and event.digest == A
        b.bring(B)


@pytest.mark.parametrize("name", ["../../etc", "A" * 64, "", "a" * 63, "a" * 64 + "\n"])
def test_a_name_that_is_no_digest_fails_and_touches_no_file(tmp_path: Path, name: str) -> None:
    with bench(tmp_path) as b:
        b.host.prefetch(name)
        assert b.host.poll() == [AdapterFailed(name, "not an adapter digest")]
        b.host.have(name)
        b.host.fetch_failed(name, "x")
        b.host.forget(name)
        b.host.release(name)
        assert b.needed == [] and list(tmp_path.iterdir()) == []


def test_idle_adapters_go_least_recently_used_first(tmp_path: Path) -> None:
    with bench(tmp_path, max_cpu_loras=3) as b:
        b.bring(A, B, C)
        for digest in (A, B, C):
            b.host.release(digest)
        assert b.host.get(A) is not None  # now B is the oldest
        b.bring(D)
        assert b.host.get(B) is None
        assert all(b.host.get(digest) is not None for digest in (A, C, D))


def test_the_byte_limit_evicts_as_many_as_needed(tmp_path: Path) -> None:
    with bench(tmp_path, cpu_lora_bytes=30) as b:  # an adapter has 9
        b.bring(A, B, C)
        for digest in (A, B, C):
            b.host.release(digest)
        b.put(D, b"x" * 18)  # 20 with its configuration
        b.host.prefetch(D)
        b.events(1)
        assert [b.host.get(digest) is not None for digest in (A, B, C, D)] == [
            False, False, True, True,
        ]  # fmt: skip
        assert b.host.num_bytes == 29


def test_wanted_adapters_are_never_evicted_and_the_next_one_waits(tmp_path: Path) -> None:
    with bench(tmp_path, max_cpu_loras=2) as b:
        b.bring(A, B)
        b.put(C)
        b.host.prefetch(C)
        assert b.host.poll() == [] and b.host.num_adapters == 2
        b.host.release(A)
        assert b.events(1)[0].digest == C
        assert b.host.get(A) is None and b.host.get(B) is not None


def test_an_adapter_that_fills_a_slot_is_read_past_the_limit(tmp_path: Path) -> None:
    with bench(tmp_path, max_cpu_loras=2) as b:
        b.bring(A, B)
        b.put(C)
        b.host.prefetch(C)
        assert b.host.get(C) is None and b.host.num_adapters == 2  # a look makes no haste
        b.host.hasten(C)
        assert b.events(1)[0].digest == C
        assert b.host.get(C) is not None


@pytest.mark.parametrize("damaged_first", [False, True])
def test_one_that_is_hastened_before_its_files_have_come_is_read_past_the_limit_too(
    tmp_path: Path, damaged_first: bool
) -> None:
    with bench(tmp_path, max_cpu_loras=2) as b:
        b.bring(A, B)  # and nobody lets go of them
        b.host.keep([A, B])
        b.host.prefetch(C)
        b.host.hasten(C)
        if damaged_first:
            b.put(C, b"damaged")
            b.host.have(C)
            while b.needed != [C, C]:
                b.host.poll()
        b.put(C)
        b.host.have(C)
        assert b.events(1)[0].digest == C
        assert b.host.get(C) is not None


def test_an_adapter_larger_than_the_limit_is_served_alone(tmp_path: Path) -> None:
    with bench(tmp_path, cpu_lora_bytes=5) as b:
        b.put(A)
        b.host.prefetch(A)
        assert isinstance(b.events(1)[0], AdapterReady)


def test_what_nobody_waits_for_any_more_is_not_read(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.host.prefetch(A)
        b.host.release(A)
        b.put(A)
        b.host.have(A)
        assert b.host.poll() == [] and b.reads == [] and b.host.num_adapters == 0
        b.host.prefetch(A)
        assert isinstance(b.events(1)[0], AdapterReady)
        assert b.needed == [A]


def test_forget_drops_memory_and_disk_also_during_a_read(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.bring(A)
        b.host.release(A)
        b.host.forget(A)
        assert b.host.get(A) is None and not (tmp_path / A).exists()

        b.gate.clear()
        b.put(B)
        b.host.prefetch(B)
        b.host.release(B)
        b.host.forget(B)
        assert b.host.num_adapters == 0
        b.host.prefetch(B)  # uploaded again meanwhile
        assert b.needed == [B]
        b.put(B)
        b.gate.set()
        b.host.have(B)
        assert [event.digest for event in b.events(1)] == [B]
        assert b.host.get(B) is not None and b.host.num_adapters == 1


def test_what_was_forgotten_while_a_client_fetched_it_goes_when_it_comes(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.host.prefetch(A)
        b.host.release(A)  # its request was aborted, and the adapter deleted
        b.host.forget(A)
        b.put(A)
        b.host.have(A)
        assert not (tmp_path / A).exists() and b.host.recent == []
        b.host.prefetch(A)  # uploaded again
        b.put(A)
        b.host.have(A)
        assert [event.digest for event in b.events(1)] == [A] and (tmp_path / A).exists()

        b.host.prefetch(B)
        b.host.forget(B)
        b.host.prefetch(B)  # uploaded again before the first fetch was answered
        b.put(B)
        b.host.have(B)
        assert [event.digest for event in b.events(1)] == [B] and (tmp_path / B).exists()

        b.host.prefetch(C)
        b.host.forget(C)
        b.host.fetch_failed(C, "deleted")
        b.put(C)
        b.host.have(C)  # of somebody who asked after it had failed
        assert (tmp_path / C).exists()


def test_the_disk_keeps_what_is_in_use_and_evicts_the_least_recently_used(tmp_path: Path) -> None:
    with bench(tmp_path, disk_lora_bytes=20) as b:  # two adapters of 9
        b.bring(A, B)
        b.host.release(A)
        b.host.prefetch(C)
        b.put(C)
        b.host.have(C)
        b.events(1)
        assert not (tmp_path / A).exists()
        assert (tmp_path / B).exists() and (tmp_path / C).exists()


def test_the_order_of_use_on_disk_survives_a_restart(tmp_path: Path) -> None:
    for number, digest in enumerate((B, A, C)):
        put_fake_adapter(tmp_path, digest)
        os.utime(tmp_path / digest, (1000 + number, 1000 + number))
    (tmp_path / ".evicted-old").mkdir()
    (tmp_path / "upload.tmp").mkdir()
    disk = AdapterDisk(tmp_path, max_bytes=20)
    assert disk.num_bytes == 27 and not (tmp_path / ".evicted-old").exists()
    disk.touch(B)
    again = AdapterDisk(tmp_path, max_bytes=20)
    again.trim(in_use=())
    assert sorted(path.name for path in tmp_path.iterdir()) == [B, C, "upload.tmp"]


def test_what_is_kept_is_read_unasked_and_never_evicted_until_it_is_kept_no_more(
    tmp_path: Path,
) -> None:
    with bench(tmp_path, max_cpu_loras=2) as b:
        b.put(A)
        b.host.keep([A, B])
        assert b.needed == [B] and b.events(1) == [AdapterReady(A, pytest.approx(0, abs=9))]
        b.put(B)
        b.host.have(B)
        b.events(1)
        b.put(C)
        b.host.prefetch(C)
        b.host.prefetch(A)
        b.host.release(A)
        assert b.reads == [A, B] and b.host.is_coming(C) and not b.host.has(C)
        b.host.hasten(C)  # for a slot: past the limit
        b.events(2)
        b.host.release(C)
        assert not b.host.has(C) and b.host.has(A) and b.host.has(B)
        b.host.keep([A])
        b.host.prefetch(C)
        b.events(1)
        assert b.host.has(A) and not b.host.has(B) and b.reads == [A, B, C, C]
        b.host.forget(A)
        assert b.host.kept == frozenset() and not b.host.has(A)


def test_keeping_again_fetches_what_could_not_be_had(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.host.keep([A, "../etc"])
        b.host.fetch_failed(A, "gone")
        assert b.host.poll() == []  # no sequence wants it: nobody is to be told
        b.host.keep([A])
        assert b.needed == [A, A]
        b.put(A)
        b.host.have(A)
        b.events(1)
        assert b.host.has(A)


def test_adapters_are_read_ahead_from_disk_while_there_is_room(tmp_path: Path) -> None:
    for digest in (A, B, C):
        put_fake_adapter(tmp_path, digest, b"damaged" if digest == B else b"weights")
    with bench(tmp_path, max_cpu_loras=2) as b:
        b.host.read_ahead([D, A, B, C])
        assert b.needed == [] and b.host.num_adapters == 2
        while b.host.is_coming(A) or b.host.is_coming(B):
            b.woken.wait(0.05)
            b.host.poll()
        assert b.host.has(A) and not b.host.has(B) and not (tmp_path / B).exists()
        b.host.prefetch(C)
        while not b.host.has(C):  # it may have been read in the damaged one's place
            b.woken.wait(0.05)
            b.host.poll()
        b.host.prefetch(D)
        b.put(D)
        b.host.have(D)
        b.events(1)
        assert not b.host.has(A), "what was read ahead is idle: it goes for what is wanted"


def test_the_last_use_is_noted_on_disk_at_its_end_and_in_between(tmp_path: Path) -> None:
    now = [0.0]
    host = AdapterHost(
        tmp_path, load_fake_adapter, need=lambda digest: None, max_cpu_loras=4,
        cpu_lora_bytes=10**9, disk_lora_bytes=10**9, clock=lambda: now[0],
    )  # fmt: skip
    for digest in (A, B, C):
        put_fake_adapter(tmp_path, digest)
        host.prefetch(digest)
    while not all(map(host.has, (A, B, C))):
        host.poll()

    def order() -> list[str]:
        return AdapterDisk(tmp_path, max_bytes=10**9).recent

    for number, digest in enumerate((A, B, C)):
        os.utime(tmp_path / digest, (1000 + number, 1000 + number))
    assert order() == [C, B, A]
    host.release(A)
    assert order() == [A, C, B] and host.recent[0] == A
    os.utime(tmp_path / A, (1500, 1500))
    now[0] += 60
    host.poll()
    assert set(order()[:2]) == {B, C}
    host.close()


class HostMachine(RuleBasedStateMachine):
    """Any order of calls keeps the counts right, the memory bounded and every prefetch answered."""

    digests = st.sampled_from([digest_of(number) for number in range(5)])

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.bench = self.stack.enter_context(bench(folder, max_cpu_loras=2, disk_lora_bytes=30))
        self.wanted: set[str] = set()
        self.unanswered: set[str] = set()

    def teardown(self) -> None:
        self.stack.close()

    @rule(digest=digests)
    def prefetch(self, digest: str) -> None:
        self.bench.host.prefetch(digest)
        self.wanted.add(digest)
        self.unanswered.add(digest)

    @rule(digest=digests)
    def release(self, digest: str) -> None:
        self.bench.host.release(digest)
        self.wanted.discard(digest)
        self.unanswered.discard(digest)

    @precondition(lambda self: self.bench.needed)
    @rule(damaged=st.booleans(), fails=st.booleans())
    def answer(self, damaged: bool, fails: bool) -> None:
        digest = self.bench.needed.pop(0)
        if fails:
            self.bench.host.fetch_failed(digest, "gone")
        else:
            self.bench.put(digest, b"damaged" if damaged else b"weights")
            self.bench.host.have(digest)

    @rule(digest=digests)
    def forget(self, digest: str) -> None:
        if digest not in self.wanted:
            self.bench.host.forget(digest)

    @rule(kept=st.sets(digests, max_size=2))
    def keep(self, kept: set[str]) -> None:
        self.bench.host.keep(kept)

    @rule(recent=st.lists(digests, max_size=3))
    def read_ahead(self, recent: list[str]) -> None:
        self.bench.host.read_ahead(recent)

    @rule(digest=digests)
    def hasten(self, digest: str) -> None:
        self.bench.host.hasten(digest)

    @rule(digest=digests)
    def get(self, digest: str) -> None:
        weights = self.bench.host.get(digest)
        assert weights is None or weights == FakeWeights(digest, 9)

    @rule()
    def poll(self) -> None:
        for event in self.bench.host.poll():
            self.unanswered.discard(event.digest)
            if isinstance(event, AdapterFailed):
                self.wanted.discard(event.digest)

    @invariant()
    def counts_are_right(self) -> None:
        self.bench.host.check_integrity()

    @rule()
    def everything_wanted_comes_in_the_end(self) -> None:
        while self.unanswered:
            while self.bench.needed:
                self.answer(damaged=False, fails=False)
            for digest in self.unanswered:
                self.bench.host.hasten(digest)
            self.poll()
            if self.unanswered and not self.bench.needed:
                self.bench.woken.wait(0.05)
                self.bench.woken.clear()


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
