"""Adapters that load, and disks that take their time, hold up nobody else: real processes.

Pipes play disks that do not answer before the test lets them: in the blob store, which API
processes read, and in the cache folder, which the engine reads.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service
from tests.support.pipes import Pipe
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.anyio

NUM_SEATS = 8
ENGINE = [
    "--dtype", "float32", "--max-loras", "4", "--max-num-seqs", str(NUM_SEATS), "--threads", "1",
    "--max-num-batched-tokens", "16", "--num-kv-blocks", "520",
]  # fmt: skip
NUM_QUICK, NUM_STUCK = 19, 7
CONTEXT = 8192


@dataclass
class World:
    """A service with one tenant, `acme`, and a client with the admin's key."""

    service: DemoService
    http: httpx.AsyncClient
    adapter: Path

    async def upload(self, name: str, number: int) -> str:
        """Upload an adapter that no other number has; returns its digest."""
        tensors = load_file(self.adapter / "adapter_model.safetensors")
        weights = save({key: tensor * (1 + number / 128) for key, tensor in tensors.items()})
        config = (self.adapter / "adapter_config.json").read_bytes()
        reply = await self.http.post(
            "/t/acme/v1/adapters", data={"name": name},
            files={"config": ("c", config), "weights": ("w", weights)},
        )  # fmt: skip
        digest: str = reply.raise_for_status().json()["digest"]
        return digest

    async def delete(self, name: str) -> None:
        (await self.http.delete(f"/t/acme/v1/adapters/{name}")).raise_for_status()

    async def set_quota(self, **quota: int) -> None:
        (await self.http.put("/admin/tenants/acme/quota", json=quota)).raise_for_status()

    async def ask(self, model: str, **fields: Any) -> int:
        """The status of a call."""
        asked = {
            "model": model, "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True,
            "temperature": 0, **fields,
        }  # fmt: skip
        return (await self.http.post("/t/acme/v1/completions", json=asked)).status_code

    def calls(self, model: str, count: int = 1, **fields: Any) -> list[asyncio.Task[int]]:
        return [asyncio.create_task(self.ask(model, **fields)) for _ in range(count)]

    async def stats(self) -> dict[str, Any]:
        reply = await self.http.get("/admin/engine")
        told: dict[str, Any] = reply.raise_for_status().json()
        return told

    async def until_told(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the engine's own figures are so."""
        async with asyncio.timeout(60):
            while True:
                told = await self.stats()
                if condition(told):
                    return told
                await asyncio.sleep(0.005)

    def stored(self, digest: str) -> Path:
        return self.service.data_dir / "blobs" / digest[:2] / digest / "adapter_config.json"

    def cached(self, digest: str) -> Path:
        return self.service.data_dir / "cache" / digest / "adapter_config.json"

    def stuck_in_the_store(self, digest: str) -> Pipe:
        return Pipe.in_place_of(self.stored(digest))

    def stuck_in_the_cache(self, digest: str) -> Pipe:
        """The files lie in the engine's folder, where reading them takes its time."""
        config = self.cached(digest)
        config.parent.mkdir()
        for file in self.stored(digest).parent.iterdir():
            os.link(file, config.parent / file.name)
        return Pipe.in_place_of(config)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncGenerator["Watch"]:
        """Meanwhile the base streams without a pause, and readiness is asked for."""
        watch = Watch(self)
        tasks = [asyncio.create_task(watch.stream()), asyncio.create_task(watch.ask_readiness())]
        try:
            await watch.goes_on(tasks)
            yield watch
            await watch.goes_on(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Watch:
    world: World
    num_tokens: int = 0
    readiness: list[int] = field(default_factory=list[int])

    async def stream(self) -> None:
        asked = {
            "model": "base", "prompt": [7], "max_tokens": CONTEXT - 8, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        while True:
            async with self.world.http.stream(
                "POST", "/t/acme/v1/completions", json=asked
            ) as reply:
                async for line in reply.aiter_lines():
                    self.num_tokens += line.startswith("data: {")

    async def ask_readiness(self) -> None:
        while True:
            reply = await self.world.http.get("/health/ready")
            self.readiness.append(reply.status_code)
            await asyncio.sleep(0.01)

    async def goes_on(self, tasks: list[asyncio.Task[None]] | None = None) -> None:
        """Another hundred tokens and five answers come, all good."""
        tokens, answers = self.num_tokens + 100, len(self.readiness) + 5
        await eventually(
            lambda: (
                (self.num_tokens >= tokens and len(self.readiness) >= answers)
                or any(task.done() for task in tasks or [])
            )
        )
        assert set(self.readiness) == {200}
        for task in tasks or []:
            assert not task.done(), task


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[DemoService, Path]]:
    folder = tmp_path_factory.mktemp("loads")
    model_dir = make_tiny_model(folder / "model", "smollm", max_position_embeddings=CONTEXT)
    adapter = make_tiny_adapter(folder / "adapter", model_dir)
    with demo_service(model_dir, "base", ENGINE) as service:
        with ApiClient(service.url, service.admin_key) as api:
            api.call("POST", "/admin/tenants", json={"name": "acme"})
        yield service, adapter


@pytest.fixture
async def world(started: tuple[DemoService, Path]) -> AsyncGenerator[World]:
    service, adapter = started
    async with httpx.AsyncClient(
        base_url=service.url, headers={"authorization": f"Bearer {service.admin_key}"},
        timeout=30, limits=httpx.Limits(max_connections=None),
    ) as http:  # fmt: skip
        yield World(service, http, adapter)


async def test_a_base_stream_and_readiness_go_on_while_many_adapters_load_from_stuck_disks(
    world: World,
):
    names = [f"stuck-{number}" for number in range(NUM_STUCK)]
    pipes = [
        world.stuck_in_the_store(await world.upload(name, number))
        for number, name in enumerate(names)
    ]
    pipes.append(world.stuck_in_the_cache(await world.upload("in-cache", NUM_STUCK)))
    for number in range(NUM_QUICK):
        await world.upload(f"quick-{number}", NUM_STUCK + 1 + number)
    async with world.watched() as watch:
        stuck = [call for name in (*names, "in-cache") for call in world.calls(name)]
        await world.until_told(lambda told: told["waiting"] == len(stuck))
        await watch.goes_on()
        quick = [call for n in range(NUM_QUICK) for call in world.calls(f"quick-{n}")]
        assert await asyncio.gather(*quick) == [200] * NUM_QUICK
        await watch.goes_on()
        # Nor is anybody else held up who uses the disk, or a thread.
        assert (await world.http.get("/metrics")).status_code == 200
        await world.upload("meanwhile", 100)
        assert await world.ask("meanwhile") == 200
        await world.delete("meanwhile")
        assert not any(call.done() for call in stuck)
        for pipe in pipes:
            pipe.answer()
        assert await asyncio.gather(*stuck) == [200] * len(stuck)


async def test_a_hundred_first_calls_to_a_cold_adapter_are_one_load(world: World):
    digest = await world.upload("cold", 101)
    pipe = world.stuck_in_the_store(digest)
    reads = world.service.log.read_text().count('"adapter_read"')
    async with world.watched() as watch:
        calls = world.calls("cold", 100)
        await world.until_told(lambda told: told["waiting"] == 100)
        await watch.goes_on()
        pipe.answer()
        assert await asyncio.gather(*calls) == [200] * 100
    assert world.service.log.read_text().count('"adapter_read"') == reads + 1
    assert not pipe.is_awaited, "it was fetched by several"


async def go_away(*calls: asyncio.Task[int]) -> None:
    """Close the connections of calls that are under way."""
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def is_idle(told: dict[str, Any]) -> bool:
    return (told["running"], told["waiting"], told["kv_blocks_used"]) == (0, 0, 0)


def in_every_way(world: World, model: str, **fields: Any) -> list[asyncio.Task[int]]:
    """Calls that are streamed and that are not, of one choice and of two."""
    return [
        call for n in (1, 2) for s in (False, True)
        for call in world.calls(model, n=n, stream=s, **fields)
    ]  # fmt: skip


@pytest.mark.slow
async def test_whoever_goes_away_in_whatever_state_leaves_nothing_in_the_engine(world: World):
    long: dict[str, Any] = {"max_tokens": CONTEXT - 100}
    digest = await world.upload("gone", 102)
    pipe = world.stuck_in_the_store(digest)
    before = await world.until_told(is_idle)

    loading = in_every_way(world, "gone", **long)
    await world.until_told(lambda told: told["waiting"] >= 4)
    await go_away(*loading)
    await world.until_told(is_idle)
    pipe.answer()
    await eventually(lambda: world.cached(digest).exists())
    told = await world.stats()
    assert digest not in told["resident"] and told["host_adapters"] == before["host_adapters"]

    await world.set_quota(max_concurrent=2)
    decoding = world.calls("gone", 1, **long) + world.calls("gone", 1, **long, stream=True)
    await world.until_told(lambda told: told["running"] == 2)
    queued = in_every_way(world, "gone", **long)
    await world.until_told(lambda told: told["waiting"] >= 4)
    await go_away(*queued)
    await world.until_told(lambda told: (told["running"], told["waiting"]) == (2, 0))
    await go_away(*decoding)
    told = await world.until_told(is_idle)
    assert told["output_tokens"] - before["output_tokens"] < CONTEXT
    await world.set_quota()

    for stream in (False, True):
        before = await world.stats()
        prompt = [4 + stream] * (CONTEXT - 100)
        prefilling = world.calls("gone", prompt=prompt, stream=stream)
        await world.until_told(lambda told: told["running"] == 1)
        await go_away(*prefilling)
        told = await world.until_told(is_idle)
        assert told["output_tokens"] == before["output_tokens"]

    for stream in (False, True):
        before = await world.stats()
        fields: dict[str, Any] = {"stream": stream, "max_tokens": 4000}
        half = [
            call for n in (6, 8)
            for call in world.calls("gone", prompt=[n + stream] * 4100, **fields)
        ]  # fmt: skip
        await world.until_told(
            lambda told, so_far=before["preemptions"]: (
                told["preemptions"] > so_far and told["waiting"] > 0
            )
        )
        await go_away(*half)
        told = await world.until_told(is_idle)
        assert told["output_tokens"] - before["output_tokens"] < 4000
    await world.delete("gone")
    await world.until_told(lambda told: digest not in told["resident"])
