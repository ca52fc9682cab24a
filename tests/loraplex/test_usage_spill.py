"""Usage rows on the disk: nothing that is queued at a stop is lost, and nothing counts twice."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.records import UsageRecord
from loraplex.usage import UsageWriter, write_rows
from loraplex.usage_spill import keep_restoring, restore, spill
from tests.support.fake_engine import FakeEngine
from tests.support.registry import FakeClock, open_registry
from tests.support.service import running_service

pytestmark = pytest.mark.anyio

ROW = UsageRecord(
    request_id="cmpl-0", tenant="acme", adapter="légal", version=3, prompt_tokens=9,
    cached_tokens=4, output_tokens=5, finish_reason="stop", queue_seconds=0.1, load_seconds=0.25,
    prefill_seconds=1 / 3, decode_seconds=2.0, engine_seconds=1e-9,
    created_at=datetime(2030, 1, 1, 12, 59, 59, 999_999, tzinfo=UTC),
)  # fmt: skip


def rows(*numbers: int, tenant: str = "acme") -> list[UsageRecord]:
    return [replace(ROW, request_id=f"cmpl-{number}", tenant=tenant) for number in numbers]


def left(folder: Path) -> list[str]:
    """The kinds of files that there are."""
    return sorted(path.suffix for path in folder.iterdir())


class Table:
    """Stands for the database: keeps what it is given, and answers no more when it is away."""

    def __init__(self, answers: int | None = None) -> None:
        self.rows: list[UsageRecord] = []
        self.batches: list[int] = []
        self.answers = answers
        """How many batches it takes until it is away; None: all."""
        self.refused = asyncio.Event()

    async def write(self, rows: Sequence[UsageRecord]) -> int:
        if self.answers is not None and len(self.batches) >= self.answers:
            self.refused.set()
            raise RegistryUnavailable("away")
        self.batches.append(len(rows))
        self.rows += rows
        return len(rows)

    async def record_usage(self, *rows: UsageRecord) -> None:
        await self.write(rows)


async def test_rows_come_back_as_they_were_and_their_file_outlives_them(tmp_path: Path):
    table = Table()
    base = replace(ROW, request_id="cmpl-1", adapter=None, version=None)
    path = spill(tmp_path, [ROW, base])

    async def write(rows: Sequence[UsageRecord]) -> int:
        assert path.exists()
        return await table.write(rows)

    assert path.stat().st_mode & 0o777 == 0o600
    await restore(tmp_path, write)
    assert table.rows == [ROW, base]
    assert left(tmp_path) == []


async def test_a_file_stays_whole_until_the_database_has_all_of_its_batches(tmp_path: Path):
    everything = rows(*range(1000))
    path = spill(tmp_path, everything)
    written = path.read_bytes()
    table = Table(answers=2)
    with pytest.raises(RegistryUnavailable):
        await restore(tmp_path, table.write)
    assert path.read_bytes() == written
    table.answers = None
    await restore(tmp_path, table.write)
    assert table.rows[-1000:] == everything and max(table.batches) < 1000
    assert not path.exists()


async def test_processes_that_stop_at_once_have_a_file_each(tmp_path: Path):
    parts = [rows(*range(number, 400, 8)) for number in range(8)]
    threads = [threading.Thread(target=spill, args=(tmp_path, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left(tmp_path) == [".jsonl"] * 8
    table = Table()
    await restore(tmp_path, table.write)
    assert sorted(row.request_id for row in table.rows) == sorted(
        row.request_id for row in rows(*range(400))
    )


@pytest.mark.parametrize(
    "line",
    [
        b'{"request_id": "cmpl-9", "tenant": "ac',
        b"\n",
        b"\xff\xfe\x00\n",
        b"[" * 4000 + b"\n",
        b'{"request_id": "cmpl-9", "tenant": "acme"}\n',
        b'{"request_id": 9}' + b" " * 3_000_000 + b"\n",
    ],
    ids=["cut", "empty line", "no text", "nested", "fields missing", "longer than a row"],
)
async def test_a_damaged_file_is_kept_aside_and_its_whole_rows_count(tmp_path: Path, line: bytes):
    path = spill(tmp_path, rows(1, 2, 3))
    first, *others = path.read_bytes().splitlines(keepends=True)
    content = b"".join([*others, first, line] if line[-1:] != b"\n" else [first, line, *others])
    path.write_bytes(content)
    later = spill(tmp_path, rows(4))
    table = Table()
    for _ in range(2):
        await restore(tmp_path, table.write)
        assert sorted(row.request_id for row in table.rows) == [f"cmpl-{n}" for n in (1, 2, 3, 4)]
    assert not later.exists()
    assert left(tmp_path) == [".damaged"]
    assert path.with_suffix(".damaged").read_bytes() == content


async def test_a_file_that_lost_all_its_bytes_is_kept_aside(tmp_path: Path):
    path = spill(tmp_path, rows(1))
    path.write_bytes(b"")
    await restore(tmp_path, Table().write)
    assert left(tmp_path) == [".damaged"]


async def test_what_cannot_be_read_holds_up_no_other_file(tmp_path: Path):
    (tmp_path / "0.jsonl").mkdir()
    spill(tmp_path, rows(1))
    table = Table()
    await restore(tmp_path, table.write)
    assert table.rows == rows(1)
    assert left(tmp_path) == [".jsonl"]


@contextlib.asynccontextmanager
async def restoring(folder: Path, table: Table) -> AsyncGenerator[None]:
    task = asyncio.create_task(keep_restoring(folder, table.write))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(table: Table, number: int) -> None:
    async with asyncio.timeout(10):
        while len(table.rows) < number:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.005)


async def test_what_a_kill_cut_short_counts_as_far_as_it_came(tmp_path: Path):
    path = spill(tmp_path, rows(1, 2, 3))
    part = path.rename(path.with_suffix(".part"))
    part.write_bytes(part.read_bytes()[:-10])
    table = Table()
    async with restoring(tmp_path, table):
        await until(table, 2)
        (tmp_path / "other.part").write_bytes(b"being written by a process that stops")
    assert table.rows == rows(1, 2)
    assert left(tmp_path) == [".damaged", ".part"]


async def test_the_database_may_be_away_at_the_next_start_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("loraplex.usage_spill._EVERY_SECONDS", 0.01)
    path = spill(tmp_path, rows(1))
    table = Table(answers=0)
    async with restoring(tmp_path, table):
        await table.refused.wait()
        assert path.exists() and table.rows == []
        table.answers = None
        await until(table, 1)
        spill(tmp_path, rows(2))  # by an API process that was stopped by itself
        await until(table, 2)
    assert table.rows == rows(1, 2)


async def test_rows_count_once_and_those_of_tenants_that_are_gone_hold_up_none(
    tmp_path: Path, registry_url: str
):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await registry.create_tenant("gone")
        await registry.create_tenant("reborn")
        now = clock.now
        of = {name: replace(ROW, tenant=name, request_id=name, created_at=now) for name in
              ("acme", "gone", "reborn", "zen")}  # fmt: skip
        folder = tmp_path / "usage"
        folder.mkdir()
        spill(folder, of.values())
        spill(folder, [replace(of["acme"], output_tokens=99)])
        await registry.record_usage(of["zen"])
        for name in ("gone", "reborn"):
            await registry.delete_tenant(name, with_usage=True)
        clock.advance(3600)
        await registry.create_tenant("reborn")
        await restore(folder, partial(write_rows, registry))
        assert left(folder) == []
        for name in ("acme", "zen"):
            assert await registry.list_usage(name) == [of[name]]
        assert await registry.list_usage("reborn") == []


async def test_a_file_of_which_the_database_knows_no_tenant_is_kept_aside(
    tmp_path: Path, registry_url: str
):
    folder = tmp_path / "usage"
    folder.mkdir()
    path = spill(folder, rows(1, 2, tenant="of another database"))
    written = path.read_bytes()
    async with open_registry(registry_url) as registry:
        for _ in range(2):
            await restore(folder, partial(write_rows, registry))
    assert left(folder) == [".refused"]
    assert path.with_suffix(".refused").read_bytes() == written


async def test_what_is_queued_when_the_service_stops_is_found_by_the_next_one(
    tmp_path: Path, registry_url: str, monkeypatch: pytest.MonkeyPatch
):
    async def away(work: object) -> None:
        raise RegistryUnavailable("no answer")

    engine = FakeEngine(lambda request: [5, 6])
    ids: list[str] = []
    async with (
        running_service(tmp_path, engine, database_url=registry_url) as service,
        service.client() as client,
    ):
        for number in range(4):
            asked = {"model": "base", "prompt": "x", "max_tokens": 2}
            reply = await client.post("/v1/completions", json=asked)
            ids.append(reply.raise_for_status().json()["id"])
            if number == 0:
                await service.usage()
                monkeypatch.setattr(service.registry.database, "write", away)
    assert sorted(engine.settled) == sorted(ids)
    async with open_registry(registry_url) as registry:
        assert [row.request_id for row in await registry.list_usage("acme")] == ids[:1]
        await restore(tmp_path / "usage", partial(write_rows, registry))
        rows = await registry.list_usage("acme")
        assert sorted(row.request_id for row in rows) == sorted(ids)
    assert left(tmp_path / "usage") == []


def writer(table: Any, folder: Path, settled: list[str]) -> UsageWriter:
    return UsageWriter(table, folder, settled.extend, retry_seconds=60.0)


async def test_a_stop_while_the_database_is_away_leaves_the_rows_on_the_disk(tmp_path: Path):
    settled: list[str] = []
    before = datetime.now(UTC)
    async with writer(Table(answers=0), tmp_path, settled) as usage:
        for row in rows(*range(300)):
            usage.record(replace(row, created_at=None))
    table = Table()
    await restore(tmp_path, table.write)
    ids = [row.request_id for row in rows(*range(300))]
    assert [row.request_id for row in table.rows] == ids == settled
    for row in table.rows:  # they count for the hour in which they were used
        assert row.created_at is not None
        assert before <= row.created_at <= before + timedelta(seconds=30)


async def test_a_stop_does_not_wait_for_a_database_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("loraplex.usage._LAST_SECONDS", 0.05)

    class Hangs:
        async def record_usage(self, *rows: UsageRecord) -> None:
            await asyncio.Event().wait()

    settled: list[str] = []
    async with asyncio.timeout(10), writer(Hangs(), tmp_path, settled) as usage:
        usage.record(ROW)
    assert settled == [ROW.request_id] and left(tmp_path) == [".jsonl"]


async def test_a_stop_with_a_database_that_answers_leaves_no_file(tmp_path: Path):
    settled: list[str] = []
    table = Table()
    async with writer(table, tmp_path, settled) as usage:
        for row in rows(*range(600)):
            usage.record(row)
    assert table.rows == rows(*range(600))
    assert len(settled) == 600 and left(tmp_path) == []


async def test_without_a_folder_to_write_to_a_stop_ends_well_and_the_engine_keeps_the_calls(
    tmp_path: Path,
):
    settled: list[str] = []
    nowhere = tmp_path / "file"
    nowhere.write_bytes(b"")
    async with asyncio.timeout(10), writer(Table(answers=0), nowhere, settled) as usage:
        usage.record(ROW)
    assert settled == []
