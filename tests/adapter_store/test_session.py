import asyncio
import socket
import sqlite3
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry import session as session_module
from adapter_store.registry.models import AdapterVersion, Tenant
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database, async_url
from tests.support.postgres import PostgresServer
from tests.support.registry import FINGERPRINT, create_schema, database_url, open_registry, upload

pytestmark = pytest.mark.anyio

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite:///relative.db", "sqlite+aiosqlite"),
        ("sqlite:////absolute.db", "sqlite+aiosqlite"),
        ("sqlite+aiosqlite:///x.db", "sqlite+aiosqlite"),
        ("postgres://u:p@h/d", "postgresql+asyncpg"),
        ("postgresql://u:p@h:5432/d", "postgresql+asyncpg"),
        ("postgresql+psycopg2://u:p@h/d", "postgresql+asyncpg"),
    ],
)
def test_urls_get_the_async_driver(url: str, driver: str):
    parsed = async_url(url)
    assert parsed.drivername == driver
    assert parsed.database == url.split("/", 3)[3]


@pytest.mark.parametrize(
    "url", ["", "registry.db", "mysql://h/d", "sqlite://", "sqlite:///:memory:"]
)
def test_unusable_urls_are_refused_and_not_repeated(url: str):
    with pytest.raises(ValueError) as caught:
        async_url(url)
    assert "secret" not in str(caught.value)


async def test_sqlite_is_set_up_for_many_readers_and_one_writer(tmp_path: Path):
    await create_schema(database_url(tmp_path))
    database = Database(database_url(tmp_path))

    async def pragmas(session: AsyncSession) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return [await session.scalar(text(f"PRAGMA {name}")) for name in names]

    assert await database.read(pragmas) == ["wal", 1, 1, 5000]
    assert await database.write(pragmas) == ["wal", 1, 1, 5000]
    await database.close()


async def test_readers_go_on_while_a_writer_is_at_work(registry_url: str):
    async with open_registry(registry_url) as registry:
        writing, go_on = asyncio.Event(), asyncio.Event()

        async def slow(session: AsyncSession) -> None:
            session.add(Tenant(name="slow", weight=1.0, created_at=NOW))
            await session.flush()
            writing.set()
            await go_on.wait()

        task = asyncio.create_task(registry.database.write(slow))
        await writing.wait()
        assert [t.name for t in await registry.list_tenants()] == ["acme", "zen"]
        go_on.set()
        await task
        assert len(await registry.list_tenants()) == 3


async def test_a_cancelled_writer_stores_nothing_and_frees_its_place(registry_url: str):
    async with open_registry(registry_url) as registry:
        writing = asyncio.Event()

        async def endless(session: AsyncSession) -> None:
            session.add(Tenant(name="ghost", weight=1.0, created_at=NOW))
            await session.flush()
            writing.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(registry.database.write(endless))
        await writing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await registry.create_tenant("after")
        assert [t.name for t in await registry.list_tenants()] == ["acme", "after", "zen"]


async def test_a_reader_sees_one_snapshot(registry_url: str):
    async with open_registry(registry_url) as registry:

        async def work(session: AsyncSession) -> tuple[int, int]:
            before = len((await session.scalars(select(Tenant.name))).all())
            await registry.create_tenant("between")
            return before, len((await session.scalars(select(Tenant.name))).all())

        assert await registry.database.read(work) == (2, 2)
        assert len(await registry.list_tenants()) == 3


async def test_what_a_reader_writes_is_dropped(registry_url: str):
    async with open_registry(registry_url) as registry:

        async def work(session: AsyncSession) -> None:
            session.add(Tenant(name="ghost", weight=1.0, created_at=NOW))
            await session.flush()

        await registry.database.read(work)
        assert len(await registry.list_tenants()) == 2


async def test_work_that_met_another_process_runs_again(registry_url: str):
    async with open_registry(registry_url) as registry:
        names = iter(["acme", "acme", "new"])

        async def work(session: AsyncSession) -> str:
            tenant = Tenant(name=next(names), weight=1.0, created_at=NOW)
            session.add(tenant)
            await session.flush()
            return tenant.name

        assert await registry.database.write(work) == "new"


async def test_work_that_always_fails_is_not_repeated_for_ever(registry_url: str):
    async with open_registry(registry_url) as registry:

        async def work(session: AsyncSession) -> None:
            session.add(Tenant(name="acme", weight=1.0, created_at=NOW))
            await session.flush()

        with pytest.raises(IntegrityError):
            await registry.database.write(work)


async def test_the_database_itself_keeps_a_version_that_an_alias_points_to(registry_url: str):
    async with open_registry(registry_url) as registry:
        await registry.register_version("acme", "a", upload("one"), FINGERPRINT)

        async def work(session: AsyncSession) -> None:
            await session.delete((await session.scalars(select(AdapterVersion))).one())
            await session.flush()

        with pytest.raises(IntegrityError):
            await registry.database.write(work)


async def test_a_time_without_a_zone_is_a_mistake(registry_url: str):
    async with open_registry(registry_url) as registry:

        async def work(session: AsyncSession) -> None:
            session.add(Tenant(name="x", weight=1.0, created_at=datetime(2030, 1, 1)))
            await session.flush()

        with pytest.raises(StatementError, match="without a zone"):
            await registry.database.write(work)


async def test_a_database_that_does_not_answer_is_a_clear_error(tmp_path: Path):
    (tmp_path / "letter.txt").write_text("not a database, but a long letter. " * 100)
    threads = set(threading.enumerate())

    async def work(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    for path in (tmp_path / "no" / "such" / "folder.db", tmp_path / "letter.txt"):
        database = Database(f"sqlite:///{path}")
        for call in (database.read, database.write):
            with pytest.raises(RegistryUnavailable) as caught:
                await call(work)
            assert str(tmp_path) not in caught.value.message
        await database.close()
    # After a failed open aiosqlite does not wait for its thread, which still reports to this loop.
    for thread in set(threading.enumerate()) - threads:
        if "connection_worker" in thread.name:
            await asyncio.to_thread(thread.join)


async def test_a_writer_that_met_another_in_a_deadlock_goes_again(registry_url: str):
    async with open_registry(registry_url) as registry:
        both_hold = asyncio.Barrier(2) if "postgresql" in registry_url else None
        runs: list[str] = []

        async def raise_weights(session: AsyncSession, names: tuple[str, str]) -> None:
            runs.append(names[0])
            for name in names:
                await session.execute(
                    update(Tenant).where(Tenant.name == name).values(weight=Tenant.weight + 1)
                )
                if both_hold is not None and len(runs) <= 2 and name == names[0]:
                    await both_hold.wait()

        write = registry.database.write
        await asyncio.gather(
            write(lambda s: raise_weights(s, ("acme", "zen"))),
            write(lambda s: raise_weights(s, ("zen", "acme"))),
        )
        assert [t.weight for t in await registry.list_tenants()] == [3.0, 3.0]
        assert len(runs) == (3 if both_hold else 2)


async def test_a_reader_whose_connection_was_cut_reads_again(
    migrated_postgres: str, postgres: PostgresServer
):
    async with open_registry(migrated_postgres) as registry:
        runs: list[int] = []

        async def work(session: AsyncSession) -> int:
            own = await session.scalar(text("SELECT pg_backend_pid()"))
            runs.append(own)
            if len(runs) == 1:
                await postgres.execute(f"SELECT pg_terminate_backend({own})")
            return len((await session.scalars(select(Tenant.name))).all())

        assert await registry.database.read(work) == 2
        assert len(set(runs)) == 2


async def test_a_frozen_writers_row_is_waited_for_a_while_only(
    registry_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session_module, "BUSY_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setitem(session_module._LIMITS, "lock_timeout", "0.2s")
    async with open_registry(registry_url) as frozen, open_registry(registry_url) as other:
        holding, thawed = asyncio.Event(), asyncio.Event()

        async def freeze(session: AsyncSession) -> None:
            await session.scalar(select(Tenant).where(Tenant.name == "acme").with_for_update())
            holding.set()
            await thawed.wait()

        async def rename(session: AsyncSession) -> None:
            await session.execute(update(Tenant).values(weight=2.0))

        task = asyncio.create_task(frozen.database.write(freeze))
        await holding.wait()
        with pytest.raises(RegistryUnavailable):
            await other.database.write(rename)
        thawed.set()
        await task
        await other.database.write(rename)


async def test_a_server_that_cannot_be_reached_is_a_clear_error(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session_module, "BUSY_TIMEOUT_SECONDS", 0.2)

    async def work(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        port = silent.getsockname()[1]
        for url in (
            f"postgresql://u:s3cret@127.0.0.1:{port}/db",
            "postgresql://u:s3cret@127.0.0.1:1/db",
            postgres.url("no_such_database"),
        ):
            database = Database(url)
            for call in (database.read, database.write):
                with pytest.raises(RegistryUnavailable) as caught:
                    await call(work)
                assert "127.0.0.1" not in caught.value.message
            await database.close()


async def test_error_texts_hold_no_values(registry_url: str):
    async with open_registry(registry_url) as registry:

        async def work(session: AsyncSession) -> None:
            await session.execute(text("INSERT INTO tenant (name) VALUES (:n)"), {"n": "s3cret"})

        with pytest.raises(IntegrityError) as caught:
            await registry.database.write(work)
        assert "s3cret" not in str(caught.value)


async def test_a_writer_waits_for_another_processs_lock(tmp_path: Path):
    async with open_registry(tmp_path) as registry:
        other = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        task = asyncio.create_task(registry.create_tenant("blue"))
        assert len(await registry.list_tenants()) == 2  # readers do not wait
        assert not task.done()
        other.execute("ROLLBACK")
        other.close()
        assert (await task).name == "blue"


async def test_a_ping_notices_that_the_file_is_damaged(tmp_path: Path):
    async with open_registry(tmp_path) as registry:
        await registry.ping()
    path = tmp_path / "registry.db"
    path.write_bytes(path.read_bytes()[:100] + b"X" * (path.stat().st_size - 100))
    registry = Registry(Database(database_url(tmp_path)))
    with pytest.raises(RegistryUnavailable):
        await registry.ping()
    await registry.close()
