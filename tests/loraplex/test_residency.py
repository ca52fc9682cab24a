"""Residency over HTTP: who may pin, how many, by name; and an engine that is told again."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from adapter_store.blobs import LocalBlobStore
from adapter_store.errors import RegistryUnavailable
from engine.config import SchedulerConfig
from engine.transport.inline_client import InlineEngineClient
from loraplex.adapter_cache import fetch_from
from loraplex.adapters.residency import ResidencyKeeper, limits_of
from loraplex.cli import main
from tests.support.fake_engine import FakeEngine, info
from tests.support.registry import FINGERPRINT, digest_of, open_registry, upload
from tests.support.scripted_engine import (
    FakeWeights,
    ScriptedRunner,
    load_fake_adapter,
    scripted_parts,
)
from tests.support.service import TestService, running_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.anyio


async def put(
    service: TestService, name: str, residency: object, key: str = "admin", tenant: str = "acme"
) -> tuple[int, str]:
    """Status, and the adapter's residency or the error's code."""
    path = f"/v1/adapters/{name}/residency"
    async with service.client(key) as client:
        reply = await client.put(
            f"/t/{tenant}{path}" if key == "admin" else path, json={"residency": residency}
        )
    body = reply.json()
    return reply.status_code, body["residency"] if reply.is_success else body["error"]["code"]


async def test_only_admins_pin_and_unpin_and_a_tenant_keeps_its_own_warm(tmp_path):
    async with running_service(tmp_path) as service:
        digest = (await service.upload("legal"))["digest"]
        assert await put(service, "legal", "pinned", "acme:tenant") == (403, "admin_required")
        assert await put(service, "legal", "warm", "acme:inference") == (403, "insufficient_scope")
        assert await put(service, "legal", "warm", "zen:tenant") == (404, "adapter_not_found")
        assert await put(service, "legal", "warm", "acme:tenant") == (200, "warm")
        assert service.engine.residencies[-1][:2] == ([], [digest])
        assert await put(service, "legal", "pinned") == (200, "pinned")
        assert service.engine.residencies[-1][:2] == ([digest], [])
        assert await put(service, "legal", "auto", "acme:tenant") == (403, "admin_required")
        async with service.client("acme:tenant") as client:
            shown = (await client.get("/v1/adapters/legal")).json()
            assert shown["residency"] == "pinned"
            assert (await client.get("/v1/adapters")).json()["data"] == [shown]
        assert await put(service, "legal", "auto") == (200, "auto")
        assert service.engine.residencies[-1][:2] == ([], [])


async def test_pins_are_bounded_by_the_slots_and_bad_bodies_are_named(tmp_path):
    engine = FakeEngine()
    engine.info = info(max_loras=2, max_cpu_loras=3)
    async with running_service(tmp_path, engine) as service:
        for number, name in enumerate(("a", "b", "c")):
            await service.upload(name, seed=number)
        await service.upload("twin", seed=0, key="zen:tenant")
        for name, tenant in (("a", "acme"), ("a", "acme"), ("twin", "zen")):
            assert await put(service, name, "pinned", tenant=tenant) == (200, "pinned")
        assert await put(service, "b", "pinned") == (409, "pin_limit_exceeded")
        assert await put(service, "b", "warm") == (200, "warm")
        assert await put(service, "c", "warm") == (409, "warm_limit_exceeded")
        for bad, code in ((None, "invalid_value"), ("PINNED", "invalid_value"), (1, None)):
            status, found = await put(service, "a", bad)
            assert status == 400 and found == (code or found)
        assert await put(service, "nothing", "auto") == (404, "adapter_not_found")
        assert await put(service, "a", "auto", tenant="nobody") == (404, "tenant_not_found")


async def test_without_slots_nothing_is_pinned(tmp_path):
    engine = FakeEngine()
    engine.info = info(max_loras=1, max_cpu_loras=1)
    async with running_service(tmp_path, engine) as service:
        await service.upload("a")
        assert await put(service, "a", "pinned") == (409, "pin_limit_exceeded")
        assert await put(service, "a", "warm") == (409, "warm_limit_exceeded")


async def test_residency_follows_what_the_bare_name_means(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        one = (await service.upload("legal", seed=1))["digest"]
        await put(service, "legal", "pinned")
        two = (await service.upload("legal", seed=2))["digest"]
        assert service.engine.residencies[-1][:2] == ([two], [])
        await service.upload("legal", seed=3, publish="false")
        assert service.engine.residencies[-1][:2] == ([two], [])
        await client.put("/v1/adapters/legal/aliases/default", json={"version": 1})
        assert service.engine.residencies[-1][:2] == ([one], [])
        await client.delete("/v1/adapters/legal")
        assert service.engine.residencies[-1][:2] == ([], [])
        await service.upload("legal", seed=1)
        assert service.engine.residencies[-1][:2] == ([], [])


async def test_a_new_engine_is_told_at_once_and_what_died_meanwhile_is_unloaded(tmp_path):
    async with running_service(tmp_path) as service:
        digests = [(await service.upload(name, seed=n))["digest"] for n, name in enumerate("ab")]
        await put(service, "a", "pinned")
        told = len(service.engine.residencies)
        service.engine.restart(recent=[digests[1], "d" * 64, digests[0]])
        await eventually(lambda: len(service.engine.residencies) > told)
        assert service.engine.residencies[-1] == ([digests[0]], [], [digests[1], digests[0]])
        assert service.engine.unloaded == ["d" * 64]


async def test_an_engine_whose_disk_holds_more_than_its_memory_drops_all_that_died(tmp_path):
    engine = FakeEngine()
    engine.info = info(max_cpu_loras=2)
    async with running_service(tmp_path, engine) as service:
        live = [(await service.upload(name, seed=n))["digest"] for n, name in enumerate("abc")]
        dead = [f"{number:064x}" for number in range(1200)]
        told = len(engine.residencies)
        engine.restart(recent=[*live, *dead])
        await eventually(lambda: len(engine.residencies) > told)
        assert engine.residencies[-1] == ([], [], live[:2])
        assert engine.unloaded == dead


async def test_an_adapter_deleted_while_the_engine_was_away_leaves_the_next_ones_disk(tmp_path):
    cache, blobs = tmp_path / "cache", tmp_path / "blobs"
    for folder in (cache, blobs):
        folder.mkdir()
    config = SchedulerConfig(num_kv_blocks=64, max_num_seqs=4, max_loras=1, max_model_len=128)
    runner = ScriptedRunner(lambda prompt, adapter: [7] * 3)
    away = FakeEngine()
    async with running_service(tmp_path, away) as service:
        digests = [
            (await service.upload(name, seed=n))["digest"] for n, name in enumerate("abcdef")
        ]
        for digest in digests:
            await LocalBlobStore(blobs).fetch(digest, cache / digest)
        away.die()
        async with service.client("acme:tenant") as client:
            for name in "abcde":
                assert (await client.delete(f"/v1/adapters/{name}")).status_code == 204
        parts = scripted_parts(runner, cache, config=config)
        async with (
            InlineEngineClient(parts, fetch_from(LocalBlobStore(blobs), cache)) as engine,
            open_registry(tmp_path) as registry,
            ResidencyKeeper(engine, registry, FINGERPRINT),
        ):
            await eventually(lambda: not any((cache / digest).exists() for digest in digests[:5]))
            assert (cache / digests[5]).exists()


async def test_a_keeper_goes_on_until_the_registry_answers(tmp_path, monkeypatch):
    engine = FakeEngine()
    async with open_registry(tmp_path) as registry:
        await registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        answers = itertools.chain([RegistryUnavailable("gone"), ValueError("odd")], [None] * 1000)
        read = registry.resident_adapters

        async def resident_adapters(*served: Any):
            if (failure := next(answers)) is not None:
                raise failure
            return await read(*served)

        monkeypatch.setattr(registry, "resident_adapters", resident_adapters)
        keeper = ResidencyKeeper(
            engine, registry, FINGERPRINT, every_seconds=0.01, retry_seconds=0.01
        )
        async with keeper:
            engine.restart(recent=[digest_of("one"), digest_of("gone")])
            await eventually(lambda: len(engine.residencies) >= 2)
        assert engine.residencies[0] == ([], [], [digest_of("one")])
        assert engine.residencies[1] == ([], [], [])


async def test_an_engine_is_not_told_to_keep_what_it_cannot_serve(tmp_path):
    engine = FakeEngine()
    sizes = {"plain": (8, 0), "of-high-rank": (32, 0), "with-a-head": (8, 5)}
    async with open_registry(tmp_path) as registry:
        for name, size in sizes.items():
            await registry.register_version("acme", name, upload(name, *size), FINGERPRINT)
            await registry.set_residency("acme", name, "warm", limits_of(engine.info))
        async with ResidencyKeeper(engine, registry, FINGERPRINT):
            on_disk = [digest_of(name) for name in sizes]
            engine.restart(on_disk)
            await eventually(lambda: len(engine.residencies) == 1)
            engine.info = info(max_lora_rank=16, max_full_values=4)
            engine.restart(on_disk)
            await eventually(lambda: len(engine.residencies) == 2)
    plain = [digest_of("plain")]
    assert engine.residencies == [([], on_disk, on_disk), ([], plain, plain)]
    assert engine.unloaded == []


async def test_a_warming_engine_is_not_ready_but_serves(tmp_path):
    engine = FakeEngine(lambda request: [5])
    async with running_service(tmp_path, engine) as service, service.client() as client:
        engine.is_warming = True
        reply = await client.get("/health/ready")
        assert reply.status_code == 503
        assert reply.json() == {"status": "warming", "engine": "warming", "registry": "ok"}
        asked = {"model": "base", "prompt": "x"}
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
        engine.is_warming = False
        assert (await client.get("/health/ready")).json()["status"] == "ok"


async def test_pinned_and_warm_adapters_are_where_they_should_be_before_they_are_asked_for(
    tmp_path,
):
    config = SchedulerConfig(num_kv_blocks=64, max_num_seqs=4, max_loras=2, max_model_len=128)
    runner = ScriptedRunner(lambda prompt, adapter: [7] * 3)
    reads: list[str] = []

    def load(digest: str, folder: Path) -> FakeWeights:
        reads.append(digest)
        return load_fake_adapter(digest, folder)

    parts = scripted_parts(runner, tmp_path / "cache", config=config, load=load)
    (tmp_path / "blobs").mkdir()
    fetch = fetch_from(LocalBlobStore(tmp_path / "blobs"), tmp_path / "cache")
    async with (
        InlineEngineClient(parts, fetch) as engine,
        running_service(tmp_path, engine) as service,
        service.client("admin") as admin,
        service.client() as client,
    ):
        digests = {
            name: (await service.upload(name, seed=n))["digest"] for n, name in enumerate("pwabc")
        }
        await put(service, "p", "pinned")
        await put(service, "w", "warm")

        async def stats() -> dict:
            return (await admin.get("/admin/engine")).json()

        await eventually(lambda: parts.core.stats().resident == [digests["p"]])
        for name in "abcabc":
            asked = {"model": name, "prompt": "x"}
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
        found = await stats()
        assert found["resident"][0] == digests["p"]
        assert (found["pinned"], found["warm"]) == ([digests["p"]], [digests["w"]])
        assert {digests["p"], digests["w"]} <= {d for d in digests.values() if parts.host.has(d)}
        waits: list[float] = []
        for name in "pw":
            reply = await client.post("/v1/completions", json={"model": name, "prompt": "x"})
            waits.append(float(reply.headers["x-loraplex-load-ms"]))
        assert waits[0] == 0.0  # it was in its slot; the other one was put there from memory
        assert reads.count(digests["p"]) == reads.count(digests["w"]) == 1


async def test_the_command_line_pins_and_moves_aliases(tmp_path):
    async with running_service(tmp_path) as service:
        await service.upload("legal", seed=1)
        await service.upload("legal", seed=2)

        async def run(*arguments: str) -> tuple[int, str]:
            assert isinstance(main, click.Group)
            options = ["--url", service.url, "--api-key", service.keys["admin"], "--tenant", "acme"]
            result = await asyncio.to_thread(
                CliRunner().invoke, main, ["adapters", *arguments, *options]
            )
            lines = [line for line in result.output.splitlines() if '"event"' not in line]  # logs
            return result.exit_code, "\n".join(lines)

        assert await run("pin", "legal") == (0, "legal is pinned")
        assert "pinned" in (await run("list"))[1]
        assert await run("warm", "legal") == (0, "legal is warm")
        assert await run("auto", "legal") == (0, "legal is auto")
        moved = await run("alias", "legal", "1")
        assert moved == (0, "legal:default now means @1, before it was @2")
        code, output = await run("alias", "legal", "9")
        told = "no version 9; it has versions 2 and 1 (404, version_not_found)"
        assert (code, told in output) == (1, True)
        code, output = await run("alias", "legal", "2", "--alias", "beta", "--expect", "7")
        assert (code, "alias_conflict" in output) == (1, True)
        assert (
            '"previous": null' in (await run("alias", "legal", "2", "--alias", "beta", "--json"))[1]
        )
