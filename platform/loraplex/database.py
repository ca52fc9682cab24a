"""The registry database's schema: bring it to the newest revision, back to an old one, or check it.

The steps are Alembic's, in the folder `migrations` of a checkout and `loraplex/migrations` of an
installed package. The command line calls this, and the supervisor: it migrates the embedded SQLite
file itself and only checks a server's database, which others may be using. API processes never
migrate.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.session import async_url, create_engine, translated_errors

T = TypeVar("T")

_ADVISORY_LOCK = 7_205_759_403_792
"""Any number that no other program locks in the same database."""


class DatabaseNotMigrated(Exception):
    """The database is not at the revision that this release needs.

    `current` is its revision, None where it has none; `newest` the one it should have.
    """

    def __init__(self, current: str | None, newest: str) -> None:
        state = "has no schema" if current is None else f"is at revision {current}"
        super().__init__(f"the database {state}; this release needs {newest}")
        self.current = current
        self.newest = newest

    @property
    def is_newer(self) -> bool:
        """Whether a newer release migrated the database: this one cannot help then."""
        return self.current is not None and self.current > self.newest


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


def newest_revision() -> str:
    """The revision that this release needs."""
    newest = _scripts().get_current_head()
    assert newest is not None
    return newest


async def upgrade(database_url: str) -> str:
    """Bring the database to the newest revision, made if there is none, and return the revision.

    Raises `ValueError` for a URL of an unsupported kind, `DatabaseNotMigrated` for a database that
    a newer release has migrated, and `RegistryUnavailable` for one that does not answer.
    """
    return await _migrate(database_url, newest_revision(), command.upgrade)


async def downgrade(database_url: str, revision: str) -> str:
    """Bring the database back to an older revision, `base` for none; what is newer is dropped.

    Returns the revision. Raises `ValueError` too for a revision that does not exist or is newer
    than the database's, else as `upgrade` does.
    """
    known = {script.revision for script in _scripts().walk_revisions()} | {"base"}
    if revision not in known:
        raise ValueError(f"there is no revision {revision[:32]!r}; known are {_listed(known)}")
    return await _migrate(database_url, revision, command.downgrade)


async def _migrate(database_url: str, revision: str, migrate: Callable[[Config, str], None]) -> str:
    newest = newest_revision()

    def run(connection: Connection) -> str:
        if connection.dialect.name != "sqlite":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        current = _revision(connection)
        config = _config()
        config.attributes["connection"] = connection
        try:
            migrate(config, revision)
        except CommandError:
            if migrate is command.downgrade and current is not None and current < revision:
                raise ValueError(f"the database is at revision {current} already") from None
            raise DatabaseNotMigrated(current, newest) from None
        return revision

    # Immediate, and the lock: of two processes that upgrade at once, the second finds it done.
    return await _run(database_url, run, immediate=True)


async def check(database_url: str) -> str:
    """The database's revision; raises `DatabaseNotMigrated` if it is not the newest one.

    Raises `ValueError` and `RegistryUnavailable` as `upgrade` does.

    Changes no schema, and makes no SQLite file where there is none.
    """
    newest = newest_revision()
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
        raise ValueError(
            f"this database needs the driver {error.name}: pip install 'loraplex[postgres]'"
        ) from None
    try:
        async with (
            translated_errors(),
            engine.execution_options(immediate=immediate).begin() as connection,
        ):
            return await connection.run_sync(work)
    except DBAPIError as error:  # a table of this name by somebody else, no permission
        raise RegistryUnavailable("the registry's database cannot be migrated") from error
    finally:
        await engine.dispose()


def is_embedded(database_url: str) -> bool:
    """Whether it is a file that one service alone uses; raises `ValueError` as `upgrade` does."""
    return async_url(database_url).get_backend_name() == "sqlite"


def _listed(revisions: set[str]) -> str:
    return ", ".join(sorted(revisions))


def _lacks_file(database_url: str) -> bool:
    path = async_url(database_url).database or ""
    return is_embedded(database_url) and not Path(path).exists()


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config() -> Config:
    config = Config()
    # ConfigParser reads % as the start of a reference.
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
