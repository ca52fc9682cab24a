"""The registry's database: engine, sessions, and what each dialect needs to be correct.

SQLite: WAL, one writer at a time. A write transaction starts with `BEGIN IMMEDIATE`, because a
deferred one that reads first and writes later fails at once, whatever the busy timeout, when
another writer came between. Within a process writers queue on a lock in order of arrival; SQLite's
own waiting is by polling and unfair.

PostgreSQL: writers are READ COMMITTED and lock the rows that they count on, readers have one
snapshot. A connection, a statement, a wait for a lock and an idle transaction all have an end, so
that a frozen process or a server that went away holds up nobody for long.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from adapter_store.errors import RegistryUnavailable

T = TypeVar("T")
Work = Callable[[AsyncSession], Awaitable[T]]

BUSY_TIMEOUT_SECONDS = 5.0
"""For a lock, a free connection and a new one."""
STATEMENT_TIMEOUT_SECONDS = 15.0
_IDLE_TRANSACTION_SECONDS = 15.0
_WRITE_ATTEMPTS = 5
# serialization_failure and deadlock_detected: another transaction came first. 0A000 is "cached
# plan must not change result type": after a migration under a running service, once a connection.
_PASSING_STATES = frozenset(("40001", "40P01", "0A000"))
_ASYNC_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
}


def async_url(url: str) -> URL:
    """The URL with the async driver that the registry uses.

    Takes `sqlite:///path`, `postgres://…` and `postgresql://…`, with or without a driver. Raises
    `ValueError` for another database, and for SQLite without a file: connections would not share
    what it holds.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ValueError(
            "the database URL has no form like sqlite:///path or postgresql://…"
        ) from None
    backend = parsed.drivername.partition("+")[0]
    if backend not in _ASYNC_DRIVERS:
        raise ValueError(f"the database {backend!r} is not supported: use sqlite or postgresql")
    if backend == "sqlite" and (not parsed.database or ":memory:" in parsed.database):
        raise ValueError("SQLite needs a file: sqlite:////absolute/path or sqlite:///relative/path")
    return parsed.set(drivername=_ASYNC_DRIVERS[backend])


def create_engine(url: str | URL, *, has_limits: bool = False) -> AsyncEngine:
    """An engine for `url`, with each dialect set up as this module says.

    SQLite's transactions are deferred unless the connection has the execution option `immediate`.
    With `has_limits` PostgreSQL ends what takes too long; migrations may take their time.
    """
    parsed = async_url(url) if isinstance(url, str) else url
    common: dict[str, Any] = {
        "hide_parameters": True,  # error texts reach logs; key hashes must not
        "json_serializer": _to_json,
        "json_deserializer": msgspec.json.decode,
    }
    if parsed.get_backend_name() != "sqlite":
        return create_async_engine(
            parsed, pool_pre_ping=True, pool_timeout=BUSY_TIMEOUT_SECONDS,
            connect_args={
                "timeout": BUSY_TIMEOUT_SECONDS,
                "command_timeout": STATEMENT_TIMEOUT_SECONDS if has_limits else None,
                "server_settings": _LIMITS if has_limits else {},
            },
            **common,
        )  # fmt: skip
    connect_args = {"isolation_level": None, "timeout": BUSY_TIMEOUT_SECONDS}
    engine = create_async_engine(parsed, connect_args=connect_args, **common)
    event.listen(engine.sync_engine, "connect", _set_up_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


_LIMITS = {
    "application_name": "loraplex",
    "lock_timeout": f"{BUSY_TIMEOUT_SECONDS:g}s",
    "idle_in_transaction_session_timeout": f"{_IDLE_TRANSACTION_SECONDS:g}s",
}


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _set_up_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={int(BUSY_TIMEOUT_SECONDS * 1000)}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


class Database:
    """Runs units of work, each in a transaction of its own. Made on the loop that uses it."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url, has_limits=True)
        self._writing_engine = self._engine.execution_options(immediate=True)
        self._reading_engine = self._engine
        self._write_lock: asyncio.Lock | None = None
        if self._engine.dialect.name == "sqlite":
            self._write_lock = asyncio.Lock()
        else:  # one snapshot for all statements of a read, as SQLite has anyway
            self._reading_engine = self._engine.execution_options(isolation_level="REPEATABLE READ")

    @property
    def engine(self) -> AsyncEngine:
        """For instrumentation."""
        return self._engine

    async def read(self, work: Work[T]) -> T:
        """Run `work` on a consistent snapshot; what it writes is dropped.

        Where the server cut the connection it runs a second time, on a new one. Raises
        `RegistryUnavailable` when the database does not answer.
        """
        async with translated_errors():
            try:
                return await self._read_once(work)
            except DBAPIError as error:
                if not (error.connection_invalidated or _is_passing(error)):
                    raise
            return await self._read_once(work)

    async def _read_once(self, work: Work[T]) -> T:
        async with self._session(self._reading_engine) as session:
            return await work(session)

    async def write(self, work: Work[T]) -> T:
        """Run `work` and commit; on any exception nothing is stored.

        A unique or foreign key violation, a deadlock or a failed serialization means that another
        process came first: `work` runs again, on what that process left. Raises
        `RegistryUnavailable` when the database does not answer.
        """
        async with translated_errors():
            for _ in range(_WRITE_ATTEMPTS - 1):
                try:
                    return await self._write_once(work)
                except DBAPIError as error:
                    if not (isinstance(error, IntegrityError) or _is_passing(error)):
                        raise
            return await self._write_once(work)

    async def _write_once(self, work: Work[T]) -> T:
        if self._write_lock is None:
            return await self._commit(work)
        async with self._write_lock:
            return await self._commit(work)

    async def _commit(self, work: Work[T]) -> T:
        async with self._session(self._writing_engine) as session, session.begin():
            return await work(session)

    def _session(self, engine: AsyncEngine) -> AsyncSession:
        return AsyncSession(engine, expire_on_commit=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()


def _is_passing(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in _PASSING_STATES


@asynccontextmanager
async def translated_errors() -> AsyncGenerator[None]:
    """Turn the driver's failures to reach or read the database into `RegistryUnavailable`."""
    try:
        yield
    except (IntegrityError, ProgrammingError, DataError):
        raise  # about the statement, not about the database
    except (DBAPIError, PoolTimeoutError, OSError) as error:
        # The driver's text may quote the database's address; the cause keeps it for the log.
        raise RegistryUnavailable("the registry's database does not answer") from error
