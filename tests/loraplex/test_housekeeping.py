"""What crashes leave behind goes again, and nothing else does."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_store.blobs import LocalBlobStore
from adapter_store.errors import BlobError, RegistryUnavailable
from adapter_store.registry.registry import Registry
from loraplex.housekeeping import keep_house, keep_registry, sweep_orphans
from tests.support.blobs import CONFIG, adapter_files
from tests.support.registry import FINGERPRINT, open_registry, upload

pytestmark = pytest.mark.anyio


async def put(blobs: LocalBlobStore, folder: Path, seed: int) -> str:
    digest, weights = adapter_files(folder, seed)
    await blobs.put(digest, CONFIG, weights)
    return digest


async def put_and_register(registry: Registry, blobs: LocalBlobStore, folder: Path) -> str:
    digest = await put(blobs, folder, 1)
    await registry.register_version(
        "acme", "legal", replace(upload("x"), digest=digest), FINGERPRINT
    )
    return digest


async def test_a_blob_whose_upload_died_before_its_row_goes_and_the_others_stay(tmp_path: Path):
    blobs = LocalBlobStore(tmp_path / "blobs")
    async with open_registry(tmp_path) as registry:
        kept = await put_and_register(registry, blobs, tmp_path)
        orphan = await put(blobs, tmp_path, 2)
        young = await sweep_orphans(registry, blobs, 3600)
        assert young is not None and young.orphans == ()
        report = await sweep_orphans(registry, blobs, 0)
        assert report is not None and report.orphans == (orphan,)
        assert await blobs.list() == [kept]


async def test_the_blobs_of_another_registry_are_left_alone(tmp_path: Path):
    blobs = LocalBlobStore(tmp_path / "blobs")
    async with open_registry(tmp_path) as registry:
        digests = [await put(blobs, tmp_path, seed) for seed in (1, 2)]
        assert await sweep_orphans(registry, blobs, 0) is None
        assert await blobs.list() == sorted(digests)


class FailsOnce(LocalBlobStore):
    """A store that does not answer the first time that it is asked what it has."""

    failures = 0
    error: Exception

    async def list(self, older_than_seconds: float = 0.0) -> list[str]:
        if self.failures == 0:
            self.failures += 1
            raise self.error
        return await super().list(older_than_seconds)


@pytest.mark.parametrize("error", [BlobError("", "no disk"), ValueError("unforeseen")])
async def test_a_store_that_fails_once_is_swept_the_next_time(tmp_path: Path, error: Exception):
    blobs = FailsOnce(tmp_path / "blobs")
    blobs.error = error
    async with open_registry(tmp_path) as registry:
        kept = await put_and_register(registry, blobs, tmp_path)
        orphan = await put(blobs, tmp_path, 2)
        house = asyncio.create_task(
            keep_house(registry, blobs, first_seconds=0, every_seconds=0.01, min_age_seconds=0)
        )
        folder = tmp_path / "blobs" / orphan[:2] / orphan
        async with asyncio.timeout(10):
            while folder.exists():  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.01)
        assert blobs.failures == 1
        assert await blobs.list() == [kept]
        house.cancel()
        with pytest.raises(asyncio.CancelledError):
            await house


class FaultyRegistry:
    """Fails in a way that nobody foresaw, the first time."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_purged = asyncio.Event()

    async def record_key_use(self) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise ValueError("unforeseen")

    async def purge_replies(self) -> None: ...

    async def purge_logins(self) -> None:
        self.is_purged.set()


async def test_a_chore_goes_on_after_what_nobody_foresaw():
    registry: Any = FaultyRegistry()
    house = asyncio.create_task(keep_registry(registry, every_seconds=0))
    async with asyncio.timeout(10):
        await registry.is_purged.wait()
    assert registry.num_calls > 1
    house.cancel()
    with pytest.raises(asyncio.CancelledError):
        await house


async def test_last_uses_are_written_behind_and_an_outage_is_survived(
    registry_url: str, monkeypatch: pytest.MonkeyPatch
):
    async with open_registry(registry_url) as registry:
        key = await registry.create_key("acme")
        await registry.authenticate(key.plain)
        write, failures = registry.database.write, 0

        async def fail_once(work: Any) -> Any:
            nonlocal failures
            if failures == 0:
                failures += 1
                raise RegistryUnavailable("away")
            return await write(work)

        monkeypatch.setattr(registry.database, "write", fail_once)
        house = asyncio.create_task(keep_registry(registry, every_seconds=0.01))
        async with asyncio.timeout(10):
            while (await registry.list_keys("acme"))[0].last_used_at is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert failures == 1
        house.cancel()
        with pytest.raises(asyncio.CancelledError):
            await house
