"""The registry database's schema: bring it to the newest revision, or check it.

The steps are Alembic's, in the folder `migrations` of a checkout and `loraplex/migrations` of an
installed package. The command line and the supervisor call this; API processes never migrate.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from adapter_store.registry.session import async_url, create_engine, translated_errors

T = TypeVar("T")


class DatabaseNotMigrated(Exception):
    """The database is not at the revision that this release needs.

    `current` is its revision, None where it has none; `newest` the one it should have.
    """

    def __init__(self, current: str | None, newest: str) -> None:
        state = "has no schema" if current is None else f"is at revision {current}"
        super().__init__(f"the database {state}; this release needs {newest}")
        self.current = current
        self.newest = newest


def migrations_dir() -> Path:
    """The folder of the migrations: beside this module if installed, else the checkout's.

    Found by path and not by import, so that a wheel, an editable install and a plain checkout on
    `PYTHONPATH` all run the migrations that belong to this very file.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "migrations", here.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError(f"no migrations beside {here}: the installation is incomplete")


async def upgrade(database_url: str) -> str:
    """Bring the database to the newest revision, made if there is none, and return the revision.

    Raises `ValueError` for a URL of an unsupported kind, `DatabaseNotMigrated` for a database that
    a newer release has migrated, and `RegistryUnavailable` for one that does not answer.
    """
    newest = _scripts().get_current_head()
    assert newest is not None

    def run(connection: Connection) -> str:
        current = _revision(connection)
        config = _config()
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, newest)
        except CommandError:
            raise DatabaseNotMigrated(current, newest) from None
        return newest

    # Immediate: of two processes that upgrade at once, the second finds the work done.
    return await _run(database_url, run, immediate=True)


async def check(database_url: str) -> str:
    """The database's revision; raises `DatabaseNotMigrated` if it is not the newest one.

    Raises `ValueError` and `RegistryUnavailable` as `upgrade` does.

    Changes no schema, and makes no SQLite file where there is none.
    """
    newest = _scripts().get_current_head()
    assert newest is not None
    current = None
    if not _lacks_file(database_url):
        current = await _run(database_url, _revision, immediate=False)
    if current != newest:
        raise DatabaseNotMigrated(current, newest)
    return newest


async def _run(url: str, work: Callable[[Connection], T], *, immediate: bool) -> T:
    try:
        engine = create_engine(url)
    except ModuleNotFoundError as error:
        raise ValueError(f"this database needs a driver: pip install {error.name}") from None
    try:
        async with (
            translated_errors(),
            engine.execution_options(immediate=immediate).begin() as connection,
        ):
            return await connection.run_sync(work)
    finally:
        await engine.dispose()


def _lacks_file(database_url: str) -> bool:
    url = async_url(database_url)
    return url.get_backend_name() == "sqlite" and not Path(url.database or "").exists()


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config() -> Config:
    config = Config()
    # ConfigParser reads % as the start of a reference.
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
