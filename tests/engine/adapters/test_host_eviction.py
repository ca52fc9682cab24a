"""The host tier within its limits: what is evicted, what waits, what is kept and read ahead."""

from pathlib import Path

import pytest

from engine.adapters.source import AdapterReady
from tests.support.adapter_bench import host_bench
from tests.support.scripted_engine import (
    digest_of,
    put_fake_adapter,
)

A, B, C, D = (digest_of(number) for number in (10, 11, 12, 13))


def test_idle_adapters_go_least_recently_used_first(tmp_path: Path) -> None:
    with host_bench(tmp_path, max_cpu_loras=3) as b:
        b.bring(A, B, C)
        for digest in (A, B, C):
            b.host.release(digest)
        assert b.host.get(A) is not None  # now B is the oldest
        b.bring(D)
        assert b.host.get(B) is None
        assert all(b.host.get(digest) is not None for digest in (A, C, D))


def test_the_byte_limit_evicts_as_many_as_needed(tmp_path: Path) -> None:
    with host_bench(tmp_path, cpu_lora_bytes=30) as b:  # an adapter has 9
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
    with host_bench(tmp_path, max_cpu_loras=2) as b:
        b.bring(A, B)
        b.put(C)
        b.host.prefetch(C)
        assert b.host.poll() == [] and b.host.num_adapters == 2
        b.host.release(A)
        assert b.events(1)[0].digest == C
        assert b.host.get(A) is None and b.host.get(B) is not None


def test_an_adapter_that_fills_a_slot_is_read_past_the_limit(tmp_path: Path) -> None:
    with host_bench(tmp_path, max_cpu_loras=2) as b:
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
    with host_bench(tmp_path, max_cpu_loras=2) as b:
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
    with host_bench(tmp_path, cpu_lora_bytes=5) as b:
        b.put(A)
        b.host.prefetch(A)
        assert isinstance(b.events(1)[0], AdapterReady)


def test_what_is_kept_is_read_unasked_and_never_evicted_until_it_is_kept_no_more(
    tmp_path: Path,
) -> None:
    with host_bench(tmp_path, max_cpu_loras=2) as b:
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
    with host_bench(tmp_path) as b:
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
    with host_bench(tmp_path, max_cpu_loras=2) as b:
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
