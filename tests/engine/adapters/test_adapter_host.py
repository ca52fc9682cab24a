"""The host tier: one fetch for many requests, bounded memory and disk, failures told once."""

import contextlib
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.adapters.host import AdapterHost
from engine.adapters.source import AdapterEvent, AdapterFailed, AdapterReady
from tests.support.adapter_bench import host_bench
from tests.support.scripted_engine import (
    FakeWeights,
    digest_of,
    put_fake_adapter,
)

A, B, C, D = (digest_of(number) for number in (10, 11, 12, 13))


def test_a_hundred_prefetches_of_a_cold_adapter_are_one_need_and_one_read(tmp_path: Path) -> None:
    with host_bench(tmp_path) as b:
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
    with host_bench(tmp_path) as b:
        b.put(A)
        b.host.prefetch(A)
        assert isinstance(b.events(1)[0], AdapterReady)
        assert b.needed == []


def test_a_prefetch_of_a_ready_adapter_is_answered_too(tmp_path: Path) -> None:
    with host_bench(tmp_path) as b:
        b.bring(A)
        b.host.prefetch(A)
        assert b.host.poll() == [AdapterReady(A, 0.0)]
        assert b.reads == [A]


def test_poll_does_not_wait_for_a_read(tmp_path: Path) -> None:
    with host_bench(tmp_path) as b:
        b.gate.clear()
        b.put(A)
        b.host.prefetch(A)
        assert b.host.poll() == []
        assert b.host.get(A) is None
        b.gate.set()
        assert b.events(1)


def test_a_failed_fetch_is_told_once_and_the_next_prefetch_asks_again(tmp_path: Path) -> None:
    with host_bench(tmp_path) as b:
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
    with host_bench(tmp_path) as b:
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
    with host_bench(tmp_path) as b:
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
    with host_bench(tmp_path) as b:
        b.host.prefetch(A)
        b.host.have(A)
        assert b.needed == [A, A]
        b.host.have(A)
        [event] = b.events(1)
        assert isinstance(event, AdapterFailed) and "missing" in event.reason


def test_a_disk_that_fails_fails_its_adapter_and_nothing_else(tmp_path: Path) -> None:
    with host_bench(tmp_path) as b:
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
    with host_bench(tmp_path) as b:
        b.host.prefetch(name)
        assert b.host.poll() == [AdapterFailed(name, "not an adapter digest")]
        b.host.have(name)
        b.host.fetch_failed(name, "x")
        b.host.forget(name)
        b.host.release(name)
        assert b.needed == [] and list(tmp_path.iterdir()) == []


def test_what_nobody_waits_for_any_more_is_not_read(tmp_path: Path) -> None:
    with host_bench(tmp_path) as b:
        b.host.prefetch(A)
        b.host.release(A)
        b.put(A)
        b.host.have(A)
        assert b.host.poll() == [] and b.reads == [] and b.host.num_adapters == 0
        b.host.prefetch(A)
        assert isinstance(b.events(1)[0], AdapterReady)
        assert b.needed == [A]


def test_forget_drops_memory_and_disk_also_during_a_read(tmp_path: Path) -> None:
    with host_bench(tmp_path) as b:
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
    with host_bench(tmp_path) as b:
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


class ReadsByHand:
    """In the place of the host's threads, working when told to: the same rules are the same run."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def submit(self, work: Callable[..., object], *args: object, **options: object) -> None:
        self.work.append(partial(work, *args, **options))

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        self.work.clear()


class HostMachine(RuleBasedStateMachine):
    """Any order of calls keeps the counts right, the memory bounded and every prefetch answered."""

    digests = st.sampled_from([digest_of(number) for number in range(5)])

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.bench = self.stack.enter_context(
            host_bench(folder, max_cpu_loras=2, disk_lora_bytes=30)
        )
        self.bench.host._threads.shutdown()
        self.reads = ReadsByHand()
        self.bench.host._threads = self.reads  # type: ignore[assignment]
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

    @precondition(lambda self: self.reads.work)
    @rule(newest=st.booleans())
    def read(self, newest: bool) -> None:
        self.reads.work.pop(-1 if newest else 0)()

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
            while self.reads.work:
                self.read(newest=False)
            self.poll()


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
