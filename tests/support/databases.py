"""Fixtures: the registry's database of a test, once on SQLite and once on PostgreSQL."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store.registry.models import Base
from loraplex.database import upgrade
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.registry import database_url

DIALECTS = ("sqlite", "postgres")
# Of this, a tenth of what a copy of a template costs, every test on PostgreSQL begins.
_CLEAN = "".join(
    ("SELECT pg_terminate_backend(pid) FROM pg_stat_activity ",
     "WHERE datname = current_database() AND pid <> pg_backend_pid(); ",
     *(f"DELETE FROM {table.name}; " for table in reversed(Base.metadata.sorted_tables))),
)  # fmt: skip


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server with no database of ours."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_postgres(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a database with the newest schema."""
    with postgres.database() as url:
        asyncio.run(upgrade(url))
        yield url


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database with the newest schema."""
    folder = tmp_path_factory.mktemp("migrated")
    asyncio.run(upgrade(database_url(folder)))
    return folder


@pytest.fixture(params=DIALECTS)
def registry_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database with the newest schema and no rows."""
    if request.param == "sqlite":
        shutil.copytree(request.getfixturevalue("migrated_sqlite"), tmp_path, dirs_exist_ok=True)
        return database_url(tmp_path)
    server: PostgresServer = request.getfixturevalue("postgres")
    url: str = request.getfixturevalue("migrated_postgres")
    asyncio.run(server.execute(_CLEAN, url))
    return url


@pytest.fixture(params=DIALECTS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without a schema; on SQLite there is no file yet."""
    if request.param == "sqlite":
        yield database_url(tmp_path)
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        with server.database() as url:
            yield url
