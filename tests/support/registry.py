"""A registry on a real database, and uploads for it without files."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import event

from adapter_store.conformance import BaseMatch, ConformanceReport
from adapter_store.peft_format import InspectedAdapter
from adapter_store.registry.models import Base
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database

FINGERPRINT = "f" * 64


class FakeClock:
    """Wall clock and monotonic clock in one; moves only when told."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.monotonic = 1000.0

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.monotonic += seconds


def database_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'registry.db'}"


async def create_schema(url: str) -> None:
    database = Database(url)
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await database.close()


@asynccontextmanager
async def open_registry(
    where: Path | str, clock: FakeClock | None = None, reserved_names: tuple[str, ...] = ()
) -> AsyncIterator[Registry]:
    """A registry with the tenants `acme` and `zen`.

    On the database of a URL (the fixture `registry_url`), or on `registry.db` in a folder, made if
    there is none.
    """
    url = where if isinstance(where, str) else database_url(where)
    if isinstance(where, Path) and not (where / "registry.db").exists():
        await create_schema(url)
    ticking = clock or FakeClock()
    registry = Registry(
        Database(url),
        reserved_names=reserved_names,
        clock=lambda: ticking.now,
        monotonic=lambda: ticking.monotonic,
    )
    try:
        if not await registry.list_tenants():
            await registry.create_tenant("acme")
            await registry.create_tenant("zen")
        yield registry
    finally:
        await registry.close()


@contextmanager
def counted_statements(registry: Registry) -> Iterator[list[str]]:
    """The SQL that a registry sends meanwhile."""
    statements: list[str] = []

    def note(_c: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    engine = registry.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


def digest_of(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def upload(content: str, rank: int = 8, full_values: int = 0) -> InspectedAdapter:
    """An inspected adapter whose digest stands for `content`."""
    digest = digest_of(content)
    report = ConformanceReport(
        digest=digest,
        bytes=len(content),
        rank=rank,
        num_modules=0,
        modules=[],
        scalings=[2.0],
        dtypes=["F32"],
        nesting="base_model.model.model.",
        no_op=False,
        base_match=BaseMatch("base", FINGERPRINT, None, None),
        full_values=full_values,
    )
    return InspectedAdapter(
        digest=digest,
        config={"peft_type": "LORA", "r": rank},
        bindings=(),
        biases={},
        report=report,
    )
