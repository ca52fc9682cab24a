"""Thousands of adapters: pages take as many statements as few do, and read by indexes."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, insert, literal, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.models import Adapter, Tenant
from adapter_store.registry.registry import Registry
from adapter_store.registry.rollup_models import AdapterStanding, TrafficRollup, TrafficSubject
from engine.telemetry.records import Objective
from loraplex.dashboard.adapter_query import adapter_view
from loraplex.dashboard.adapters_query import TableQuery, adapters_table
from loraplex.dashboard.overview_query import overview
from loraplex.dashboard.slots_query import slots
from loraplex.recorder.rows import traffic_values
from loraplex.recorder.standings import standing_of
from loraplex.recorder.traffic import Traffic
from loraplex.recorder.widths import MINUTE, SPANS, first_bucket
from tests.support.records import request_record
from tests.support.registry import open_registry

pytestmark = pytest.mark.anyio

NUM_ADAPTERS = 5000
SPAN = SPANS["1h"]
NUM_MINUTES = SPAN.seconds // SPAN.width
BIG = ("traffic_rollup", "adapter_standing", "traffic_subject")


async def write_hour(registry: Registry, now: float) -> None:
    """An hour of 5,000 adapters of `acme`, with a request of each in every minute."""
    begin = first_bucket(SPAN, now)
    part = Traffic()
    part.add_request(request_record(), Objective())
    standing = standing_of(SPAN, begin, now, {begin: part})
    assert standing is not None
    names = [f"a{number:04}" for number in range(NUM_ADAPTERS)]
    owner = select(Tenant.id).where(Tenant.name == "acme").scalar_subquery()
    created = registry._clock()

    async def work(session: AsyncSession) -> None:
        await session.execute(
            insert(TrafficSubject),
            [
                {"tenant": "", "adapter": "", "version": 0},
                {"tenant": "acme", "adapter": "", "version": 0},
                *({"tenant": "acme", "adapter": name, "version": 1} for name in names),
            ],
        )
        tenant_id = await session.scalar(select(owner))
        await session.execute(
            insert(Adapter),
            [
                {"tenant_id": tenant_id, "name": name, "last_version": 1, "created_at": created}
                for name in names
            ],
        )
        await session.execute(
            insert(AdapterStanding),
            [
                {
                    **standing, "span": SPAN.seconds, "tenant": "acme", "adapter": name,
                    "queue_p95": number / 1000,
                }
                for number, name in enumerate(names)
            ],
        )  # fmt: skip
        values = traffic_values(part)
        table = TrafficRollup.__table__
        starts = union_all(
            *(select(literal(begin + n * MINUTE).label("start")) for n in range(NUM_MINUTES))
        ).subquery()
        await session.execute(
            insert(TrafficRollup).from_select(
                ["subject_id", "width", "start", *values],
                select(
                    TrafficSubject.id, literal(MINUTE), starts.c.start,
                    *(literal(value, table.c[name].type) for name, value in values.items()),
                ).join(starts, literal(True)),
            )
        )  # fmt: skip

    await registry.database.write(work)
    async with registry.database.engine.begin() as connection:
        await connection.execute(text("ANALYZE"))


@contextmanager
def statements(registry: Registry) -> Iterator[list[tuple[str, Any]]]:
    """What is sent meanwhile, with its parameters."""
    sent: list[tuple[str, Any]] = []

    def note(_c: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        sent.append((statement, parameters))

    engine = registry.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def whole_tables_read(registry: Registry, sent: list[tuple[str, Any]]) -> set[str]:
    """Of the big tables, those that a plan reads from end to end."""
    is_sqlite = registry.database.engine.dialect.name == "sqlite"
    found: set[str] = set()
    async with registry.database.engine.connect() as connection:
        for statement, parameters in sent:
            if not statement.lstrip().upper().startswith("SELECT"):
                continue
            prefix = "EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN "
            rows = await connection.exec_driver_sql(prefix + statement, parameters)
            for row in rows:
                line = str(row[-1])
                for table in BIG:
                    scans = f"SCAN {table}" if is_sqlite else f"Seq Scan on {table}"
                    if scans in line and "USING" not in line:
                        found.add(table)
    return found


BY_QUEUE_TIME = TableQuery(range_="1h", tenant=None, sort="queue_p95")
SEARCH = TableQuery(range_="1h", tenant="acme", search="a49")
Page = Callable[[AsyncSession, float], Awaitable[Any]]
PAGES: list[tuple[Page, int]] = [
    (lambda s, now: overview(s, None, "1h", now, None), 3),
    (lambda s, now: overview(s, "acme", "1h", now, None), 3),
    (lambda s, now: adapters_table(s, BY_QUEUE_TIME, now), 6),
    (lambda s, now: adapters_table(s, SEARCH, now), 7),
    (lambda s, now: adapter_view(s, "acme", "a0007", "1h", now), 11),
    (lambda s, now: slots(s, None, "1h", now), 6),
]  # fmt: skip


async def test_pages_over_5000_adapters_are_few_statements_over_indexes(registry_url: str):
    now = time.time()
    async with open_registry(registry_url) as registry:
        await write_hour(registry, now)
        for page, most in PAGES:
            with statements(registry) as sent:
                await registry.database.read(lambda s, page=page: page(s, now))
            asked = [entry for entry in sent if entry[0].lstrip().upper().startswith("SELECT")]
            assert len(asked) <= most
            # Sorting all rows of a window reads them all; by its index, not the other windows'.
            assert await whole_tables_read(registry, asked) <= {"adapter_standing"}

        table = await registry.database.read(lambda s: adapters_table(s, BY_QUEUE_TIME, now))
        assert (table.total, len(table.rows)) == (NUM_ADAPTERS, 50)
        assert [row.adapter for row in table.rows[:2]] == ["a4999", "a4998"]
        view = await registry.database.read(lambda s: adapter_view(s, "acme", "a0007", "1h", now))
        assert view.row.requests == NUM_MINUTES
