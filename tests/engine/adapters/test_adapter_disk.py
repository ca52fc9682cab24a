"""Adapter files on local disk: the order of use, and what goes first."""

import os
from pathlib import Path

from engine.adapters.disk import AdapterDisk
from engine.adapters.host import AdapterHost
from tests.support.adapter_bench import host_bench
from tests.support.scripted_engine import (
    digest_of,
    load_fake_adapter,
    put_fake_adapter,
)

A, B, C, D = (digest_of(number) for number in (10, 11, 12, 13))


def test_the_disk_keeps_what_is_in_use_and_evicts_the_least_recently_used(tmp_path: Path) -> None:
    with host_bench(tmp_path, disk_lora_bytes=20) as b:  # two adapters of 9
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
