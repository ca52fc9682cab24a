import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from adapter_store.errors import RegistryUnavailable
from adapter_store.model_ref import ModelRef
from adapter_store.registry.models import Base
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database, create_engine
from loraplex.database import DatabaseNotMigrated, check, downgrade, migrations_dir, upgrade
from tests.support.registry import FINGERPRINT, database_url, upload

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


async def on_connection(url: str, work):
    engine = create_engine(url)
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(work)
    finally:
        await engine.dispose()


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


async def test_migrations_make_exactly_the_tables_of_the_models(empty_url: str):
    await upgrade(empty_url)

    def differences(connection: Connection):
        options = {"compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        return compare_metadata(context, Base.metadata)

    assert await on_connection(empty_url, differences) == []
    assert await on_connection(empty_url, tables) == {*Base.metadata.tables, "alembic_version"}


async def test_constraints_are_named_as_the_models_name_them(empty_url: str):
    """Autogenerate compares neither names of keys nor of constraints."""

    def names(connection: Connection) -> set[tuple[str, str | None]]:
        found = inspect(connection)
        return {
            (table, constraint["name"])
            for table in Base.metadata.tables
            for constraint in (
                *found.get_unique_constraints(table),
                *found.get_foreign_keys(table),
                *found.get_indexes(table),
                found.get_pk_constraint(table),
            )
        }

    await upgrade(empty_url)
    migrated = await on_connection(empty_url, names)
    await downgrade(empty_url, "base")
    await on_connection(empty_url, Base.metadata.create_all)
    assert migrated == await on_connection(empty_url, names)
    assert all(name is not None for _, name in migrated)


async def test_a_database_without_a_schema_is_detected_and_not_made(tmp_path: Path):
    url = database_url(tmp_path)
    with pytest.raises(DatabaseNotMigrated, match="has no schema") as caught:
        await check(url)
    assert caught.value.current is None
    assert os.listdir(tmp_path) == []

    await on_connection(url, lambda c: c.execute(text("CREATE TABLE other (x INTEGER)")))
    with pytest.raises(DatabaseNotMigrated):
        await check(url)
    revision = await upgrade(url)
    assert await check(url) == revision == caught.value.newest
    assert await upgrade(url) == revision  # again: nothing to do


async def test_a_database_of_a_newer_release_is_left_alone(empty_url: str):
    await upgrade(empty_url)
    await on_connection(
        empty_url, lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    )
    for call in (check, upgrade):
        with pytest.raises(DatabaseNotMigrated, match="9999"):
            await call(empty_url)


async def test_each_migration_goes_down_and_up_again_and_keeps_the_rows(empty_url: str):
    await upgrade(empty_url)
    script = ScriptDirectory(str(migrations_dir()))
    revisions = [step.revision for step in script.walk_revisions()]
    assert len(script.get_heads()) == 1
    registry = Registry(Database(empty_url))
    await registry.create_tenant("acme")
    await registry.register_version("acme", "a", upload("one"), FINGERPRINT)
    await registry.close()
    for older in revisions[1:]:
        assert await downgrade(empty_url, older) == older
        with pytest.raises(DatabaseNotMigrated, match=older):
            await check(empty_url)
    await upgrade(empty_url)
    registry = Registry(Database(empty_url))
    assert (await registry.resolve("acme", ModelRef("a"))).version == 1
    await registry.close()
    await downgrade(empty_url, "base")
    assert await on_connection(empty_url, tables) == {"alembic_version"}
    await upgrade(empty_url)
    assert await on_connection(empty_url, tables) == {*Base.metadata.tables, "alembic_version"}


async def test_there_is_no_way_down_to_what_is_above(empty_url: str):
    await upgrade(empty_url)
    await downgrade(empty_url, "0001")
    with pytest.raises(ValueError, match="at revision 0001 already"):
        await downgrade(empty_url, "0002")
    with pytest.raises(ValueError, match="no revision '0815'; known are 0001"):
        await downgrade(empty_url, "0815")


async def test_a_failed_upgrade_leaves_the_old_schema(empty_url: str):
    await on_connection(empty_url, lambda c: c.execute(text("CREATE TABLE usage (x INTEGER)")))
    with pytest.raises(RegistryUnavailable) as raised:
        await upgrade(empty_url)
    assert "already exists" in str(raised.value.__cause__)
    assert await on_connection(empty_url, tables) == {"usage"}


async def test_parallel_upgrades_do_it_once(empty_url: str):
    await on_connection(empty_url, lambda c: c.execute(text("SELECT 1")))  # the file, in WAL mode
    code = "import asyncio, sys\nfrom loraplex.database import upgrade\n"
    code += "asyncio.run(upgrade(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}

    def start_three_and_wait() -> list[int]:
        command = [sys.executable, "-c", code, empty_url]
        started = [subprocess.Popen(command, env=env) for _ in range(3)]
        return [process.wait(60) for process in started]

    assert await asyncio.to_thread(start_three_and_wait) == [0, 0, 0]
    await check(empty_url)


async def test_the_registry_works_on_a_migrated_database(empty_url: str):
    await upgrade(empty_url)
    registry = Registry(Database(empty_url))
    await registry.create_tenant("acme")
    created = await registry.create_key("acme")
    assert await registry.authenticate(created.plain) is not None
    await registry.close()


@pytest.mark.parametrize("migrations", ["loraplex/migrations", "../migrations"])
def test_migrations_are_found_in_a_wheel_and_in_a_checkout(tmp_path: Path, migrations: str):
    """The two layouts: one folder of packages, and `platform/loraplex` beside `migrations`."""
    packages = tmp_path / "platform"
    for package in ("adapter_store", "loraplex"):
        source = ROOT / package if package == "adapter_store" else ROOT / "platform" / package
        shutil.copytree(source, packages / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "migrations", packages / migrations)
    code = "import asyncio, sys\nfrom loraplex.database import check, upgrade, migrations_dir\n"
    code += "print(migrations_dir()); url = sys.argv[1]\n"
    code += "assert asyncio.run(upgrade(url)) == asyncio.run(check(url))"
    done = subprocess.run(
        [sys.executable, "-c", code, database_url(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == (packages / migrations).resolve()
