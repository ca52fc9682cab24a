"""A real service with two API processes on PostgreSQL and Redis, each of which can be called."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from safetensors.torch import load_file, save
from sqlalchemy import func, select

from adapter_store.registry.models import Base
from adapter_store.registry.records import UsageRecord
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from loraplex.demo.service import DemoService, demo_service

Both = tuple[httpx.AsyncClient, httpx.AsyncClient]
ENGINE = [
    "--dtype", "float32", "--max-num-seqs", "8", "--threads", "1", "--num-kv-blocks", "1024",
    "--workers", "2", "--drain-seconds", "2", "--api-silence-seconds", "4",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed completion that has begun."""

    task: asyncio.Task[list[str]]
    events: list[str]
    """What has come so far."""

    @property
    def call(self) -> str:
        """The id of the call, which its usage row has."""
        return json.loads(self.events[0])["id"]

    async def code(self) -> str:
        """The code of the error that it ended with."""
        return json.loads((await self.task)[-1])["error"]["code"]


@dataclass(frozen=True, slots=True)
class ApiProcesses:
    service: DemoService

    def pids(self) -> list[int]:
        children = psutil.Process(self.service.process.pid).children()
        return sorted(c.pid for c in children if "loraplex.api_process" in _command_of(c))

    @contextlib.asynccontextmanager
    async def client(self, pid: int) -> AsyncGenerator[httpx.AsyncClient]:
        """An admin's client whose one connection is held by this API process."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(500):
                client = await stack.enter_async_context(
                    httpx.AsyncClient(
                        base_url=self.service.url,
                        headers={"authorization": f"Bearer {self.service.admin_key}"},
                        timeout=60, limits=httpx.Limits(max_connections=1),
                    )
                )  # fmt: skip
                # Not left waiting for the one that a test has frozen.
                with contextlib.suppress(httpx.TransportError):
                    reply = await client.get(f"{self.service.url}/health/live", timeout=1.0)
                    stream = reply.extensions["network_stream"]
                    if self._holder(stream.get_extra_info("client_addr")[1]) == pid:
                        yield client
                        return
            raise AssertionError(f"no connection came to {pid}")

    def _holder(self, port: int) -> int | None:
        """Which API process has the connection that comes from this port."""
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = psutil.Process(pid).net_connections("tcp")
                if any(c.raddr and c.raddr.port == port for c in connections):
                    return pid
        return None

    async def stream(
        self, client: httpx.AsyncClient, model: str, max_tokens: int, tenant: str = "acme"
    ) -> Streamed:
        """Begin a stream on a client's connection; returns with its first event."""
        begun: asyncio.Event = asyncio.Event()
        asked = {
            "model": model, "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True,
            "temperature": 0, "stream": True,
        }  # fmt: skip
        url = f"{self.service.url}/t/{tenant}/v1/completions"

        events: list[str] = []

        async def read() -> list[str]:
            async with client.stream("POST", url, json=asked) as reply:
                assert reply.status_code == 200, (await reply.aread(), self.log())
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
                        begun.set()
            return events

        task = asyncio.create_task(read())
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        waiting.cancel()
        assert begun.is_set(), (task, self.log())
        return Streamed(task, events)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - other processes change it
                await asyncio.sleep(0.05)

    async def until_replaced(self, pid: int) -> None:
        """Wait until a dead API process has a successor that answers."""
        await self.until(lambda: pid not in self.pids() and len(self.pids()) == 2)
        for successor in self.pids():
            async with self.client(successor) as client:
                assert (await client.get("/health/live")).status_code == 200

    async def until_over(self, client: httpx.AsyncClient, tenant: str) -> None:
        """Wait until the engine has none of a tenant's calls any more."""
        async with asyncio.timeout(60):
            while True:
                stats: dict[str, Any] = (await client.get("/admin/engine")).json()
                if tenant not in (name for name, *_ in stats["tenants"]):
                    return
                await asyncio.sleep(0.05)

    def log(self) -> str:
        return self.service.log.read_text()


def _command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []


@contextlib.contextmanager
def api_processes(
    model_dir: Path, database_url: str, redis_url: str, *options: str
) -> Generator[ApiProcesses]:
    """Start the service; the database has its schema. `options` are those of `loraplex serve`."""
    variables = {"LORAPLEX_DATABASE_URL": database_url, "LORAPLEX_REDIS_URL": redis_url}
    with demo_service(model_dir, "base", [*ENGINE, *options], variables) as service:
        yield ApiProcesses(service)


@dataclass(frozen=True, slots=True)
class World:
    """The service, with the tenants `acme` and `zen`, and what to upload to it."""

    apis: ApiProcesses
    adapter: Path
    database_url: str

    def files(self, number: int) -> dict[str, tuple[str, bytes]]:
        """An upload of an adapter that no other number has."""
        tensors = load_file(self.adapter / "adapter_model.safetensors")
        weights = save({name: tensor * (1 + number / 128) for name, tensor in tensors.items()})
        config = (self.adapter / "adapter_config.json").read_bytes()
        return {"config": ("c", config), "weights": ("w", weights)}

    async def row_of(self, broken: Streamed) -> UsageRecord:
        """The usage row of a stream whose process could not write it; fails if there are two."""
        call = broken.call
        registry = Registry(Database(self.database_url))
        try:
            async with asyncio.timeout(30):
                while True:
                    rows = await registry.list_usage("acme", 1000)
                    if found := [row for row in rows if row.request_id == call]:
                        [row] = found
                        return row
                    await asyncio.sleep(0.05)
        finally:
            await registry.close()

    async def count_rows(self, *tables: type[Base]) -> dict[str, int]:
        """How many rows each of the tables has now."""
        database = Database(self.database_url)
        try:
            return {
                table.__tablename__: await database.read(
                    lambda s, table=table: s.scalar(select(func.count()).select_from(table))
                )
                or 0
                for table in tables
            }
        finally:
            await database.close()

    async def upload(self, client: httpx.AsyncClient, name: str, number: int) -> httpx.Response:
        return await client.post(
            "/t/acme/v1/adapters", data={"name": name}, files=self.files(number)
        )

    def swept(self, *options: str) -> dict[str, Any]:
        """What the sweeper would do, or did."""
        command = [sys.executable, "-m", "loraplex", "blobs", "sweep", "--json", *options]
        done = subprocess.run(
            [*command, "--min-age", "0", "--data-dir", str(self.apis.service.data_dir)],
            capture_output=True, check=True,
            env={**os.environ, "LORAPLEX_DATABASE_URL": self.database_url},
        )  # fmt: skip
        return json.loads(done.stdout)
