import asyncio
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from adapter_store import blob_folder
from adapter_store.blobs import LocalBlobStore
from adapter_store.errors import BlobCorrupt, BlobError, BlobMissing
from adapter_store.sweeper import remove_unused, sweep
from tests.support.blobs import CONFIG, adapter_files, age, tree

pytestmark = pytest.mark.anyio


def stored(root: Path, digest: str) -> Path:
    return root / digest[:2] / digest


async def test_what_was_put_is_fetched(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "cache" / digest)
    assert tree(tmp_path / "cache") == {
        f"{digest}/adapter_config.json": CONFIG,
        f"{digest}/adapter_model.safetensors": weights.read_bytes(),
    }
    assert await store.list() == [digest]
    assert list((tmp_path / "blobs" / "tmp").iterdir()) == []


async def test_the_blob_is_a_copy_of_its_own(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    original = weights.read_bytes()
    weights.write_bytes(b"reused by the caller")
    await store.fetch(digest, tmp_path / "one")
    (tmp_path / "one" / blob_folder.WEIGHTS_FILE).write_bytes(b"damaged cache")
    await store.fetch(digest, tmp_path / "two")
    assert (tmp_path / "two" / blob_folder.WEIGHTS_FILE).read_bytes() == original


async def test_a_put_is_on_the_disk_and_a_fetched_copy_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[str] = []
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    files = [blob_folder.CONFIG_FILE, blob_folder.WEIGHTS_FILE]
    assert synced == [*files, digest, digest[:2]], "files, then the folder, then its name"
    synced.clear()
    await store.fetch(digest, tmp_path / "cache" / digest)
    assert synced == []


async def test_files_that_are_not_the_digests_are_refused(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    other, _ = adapter_files(tmp_path, 2)
    for wrong_digest, config in ((other, CONFIG), (digest, b'{"peft_type": "LORA"'), (digest, b"")):
        with pytest.raises(BlobCorrupt):
            await store.put(wrong_digest, config, weights)
    assert await store.list() == []
    assert tree(tmp_path / "blobs" / "tmp") == {}


async def test_parallel_puts_and_fetches_of_one_digest_all_succeed(tmp_path: Path):
    digest, weights = adapter_files(tmp_path, 1)
    stores = [LocalBlobStore(tmp_path / "blobs") for _ in range(2)]
    await asyncio.gather(*(stores[i % 2].put(digest, CONFIG, weights) for i in range(10)))
    await asyncio.gather(*(stores[i % 2].fetch(digest, tmp_path / "into") for i in range(10)))
    assert blob_folder.holds(tmp_path / "into", digest)
    assert await stores[0].list() == [digest]
    assert list((tmp_path / "blobs" / "tmp").iterdir()) == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("damage", ["flip", "truncate", "no weights", "no config", "bad config"])
async def test_a_damaged_blob_is_set_aside_and_a_put_mends_it(tmp_path: Path, damage: str):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    folder = stored(tmp_path / "blobs", digest)
    file = folder / blob_folder.WEIGHTS_FILE
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        os.truncate(file, 40)
    elif damage == "no weights":
        file.unlink()
    elif damage == "no config":
        (folder / blob_folder.CONFIG_FILE).unlink()
    else:
        (folder / blob_folder.CONFIG_FILE).write_bytes(b"{")

    with pytest.raises(BlobCorrupt) as caught:
        await store.fetch(digest, tmp_path / "into")
    assert caught.value.digest == digest
    assert not (tmp_path / "into").exists()
    [aside] = (tmp_path / "blobs" / "quarantine").iterdir()
    assert aside.name.startswith(digest)
    with pytest.raises(BlobMissing):
        await store.fetch(digest, tmp_path / "into")

    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "into")
    assert blob_folder.holds(tmp_path / "into", digest)


async def test_a_put_over_a_damaged_blob_mends_it_before_anyone_fetches(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    (stored(tmp_path / "blobs", digest) / blob_folder.WEIGHTS_FILE).write_bytes(b"")
    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "into")
    assert len(list((tmp_path / "blobs" / "quarantine").iterdir())) == 1


async def test_a_damaged_copy_in_the_cache_is_replaced_and_a_good_one_is_kept(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    into = tmp_path / "cache" / digest
    await store.fetch(digest, into)
    inode = into.stat().st_ino
    await store.fetch(digest, into)
    assert into.stat().st_ino == inode
    (into / blob_folder.WEIGHTS_FILE).write_bytes(b"damaged")
    await store.fetch(digest, into)
    assert blob_folder.holds(into, digest)
    assert into.stat().st_ino != inode


async def test_missing_blobs_are_told_from_damaged_ones(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, _ = adapter_files(tmp_path, 1)
    with pytest.raises(BlobMissing):
        await store.fetch(digest, tmp_path / "into")
    await store.delete(digest)  # harmless


async def test_a_deleted_blob_is_gone(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    await store.delete(digest)
    assert await store.list() == []
    assert tree(tmp_path / "blobs") == {}
    with pytest.raises(BlobMissing):
        await store.fetch(digest, tmp_path / "into")


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "..",
        "../../etc/passwd",
        "/etc",
        "a" * 63,
        "A" * 64,
        "g" * 64,
        "a" * 64 + "\n",
        "a/" * 32,
    ],
)
async def test_only_digests_become_paths(tmp_path: Path, digest: str):
    store = LocalBlobStore(tmp_path / "blobs")
    _, weights = adapter_files(tmp_path, 1)
    before = tree(tmp_path)
    for call in (
        store.put(digest, CONFIG, weights),
        store.fetch(digest, tmp_path / "into"),
        store.delete(digest),
    ):
        with pytest.raises(BlobError, match="not a digest"):
            await call
    with pytest.raises(BlobError, match="not a digest"):
        async with store.hold(digest):
            pass
    assert tree(tmp_path) == before


async def test_a_full_disk_is_a_blob_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)

    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(BlobError, match="No space left on device") as caught:
            await store.put(digest, CONFIG, weights)
    assert str(tmp_path) not in caught.value.message
    assert tree(tmp_path / "blobs") == {}
    await store.put(digest, CONFIG, weights)
    assert await store.list() == [digest]


async def test_a_root_that_cannot_be_used_is_a_blob_error(tmp_path: Path):
    (tmp_path / "blobs").write_text("a file where the folder should be")
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    with pytest.raises(BlobError):
        await store.put(digest, CONFIG, weights)
    (tmp_path / "blobs").unlink()
    await store.put(digest, CONFIG, weights)
    shutil.rmtree(tmp_path / "blobs/tmp")
    (tmp_path / "blobs/tmp").write_text("and another one")
    with pytest.raises(BlobError):
        await store.clear_leftovers(0)
    assert await store.list() == [digest]


async def test_a_hold_keeps_others_out_also_over_stores(tmp_path: Path):
    one, two = LocalBlobStore(tmp_path / "blobs"), LocalBlobStore(tmp_path / "blobs")
    digest = "ab" + "0" * 62
    inside: list[str] = []

    async def hold(store: LocalBlobStore, name: str) -> None:
        async with store.hold(digest):
            assert inside == []
            inside.append(name)
            for _ in range(5):
                await asyncio.sleep(0)
            inside.remove(name)

    await asyncio.gather(*(hold(store, f"{i}") for i in range(10) for store in (one, two)))


async def test_a_cancelled_holder_lets_go(tmp_path: Path):
    one, two = LocalBlobStore(tmp_path / "blobs"), LocalBlobStore(tmp_path / "blobs")
    digest = "ab" + "0" * 62
    async with one.hold(digest):
        task = asyncio.create_task(two.hold(digest).__aenter__())
        await asyncio.sleep(0)  # it is at the lock now
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with two.hold(digest):
        pass


async def test_a_sweep_removes_what_no_version_names(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    live, weights = adapter_files(tmp_path, 1)
    orphan, other_weights = adapter_files(tmp_path, 2)
    await store.put(live, CONFIG, weights)
    await store.put(orphan, CONFIG, other_weights)
    (tmp_path / "blobs" / "tmp" / ".placing-x").mkdir()
    (tmp_path / "blobs" / "tmp" / ".placing-x" / "half").write_bytes(b"a crash left this")

    async def live_digests(digests: Iterable[str]) -> set[str]:
        return {live}.intersection(digests)

    dry = await sweep(store, live_digests, older_than_seconds=0, dry_run=True)
    assert (dry.orphans, dry.leftovers) == ((orphan,), 1)
    assert len(await store.list()) == 2
    assert await sweep(store, live_digests, older_than_seconds=0) == dry
    assert await store.list() == [live]
    assert list((tmp_path / "blobs" / "tmp").iterdir()) == []
    again = await sweep(store, live_digests, older_than_seconds=0)
    assert (again.orphans, again.leftovers) == ((), 0)


async def test_a_sweep_leaves_what_is_young_and_what_was_put_again(tmp_path: Path):
    store = LocalBlobStore(tmp_path / "blobs")
    digests: list[str] = []
    for seed in range(3):
        digest, weights = adapter_files(tmp_path, seed)
        await store.put(digest, CONFIG, weights)
        digests.append(digest)
    young, old, renewed = digests
    for digest in (old, renewed):
        age(stored(tmp_path / "blobs", digest), 7200)
    await store.put(renewed, CONFIG, adapter_files(tmp_path, 2)[1])

    async def live_digests(_: Iterable[str]) -> set[str]:
        return set()

    report = await sweep(store, live_digests, older_than_seconds=3600)
    assert report.orphans == (old,)
    assert await store.list() == sorted([young, renewed])


async def test_an_upload_that_comes_between_keeps_its_blob(tmp_path: Path):
    """A deletion asks the registry only once no upload holds the digest."""
    store = LocalBlobStore(tmp_path / "blobs")
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    live: set[str] = set()

    async def live_digests(digests: Iterable[str]) -> set[str]:
        return live.intersection(digests)

    async with store.hold(digest):  # the upload of another tenant
        deletion = asyncio.create_task(remove_unused(store, live_digests, [digest]))
        await store.put(digest, CONFIG, weights)
        live.add(digest)  # its commit
    assert await deletion == []
    assert await store.list() == [digest]
    live.clear()
    assert await remove_unused(store, live_digests, [digest]) == [digest]
    assert await store.list() == []


async def test_a_put_that_was_cut_short_is_found_by_the_sweeper_only(tmp_path: Path):
    """What a killed process leaves: half a folder in `tmp`, or a whole blob that no row names."""
    digest, weights = adapter_files(tmp_path, 1)
    code = (
        "import os, sys, shutil\n"
        "from pathlib import Path\n"
        "from adapter_store import blob_folder\n"
        "from tests.support.blobs import CONFIG\n"
        "root, digest, weights = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])\n"
        "shutil.copyfile = lambda source, target: os._exit(9)\n"
        "blob_folder.place(digest, CONFIG, weights, root / digest[:2] / digest, root / 'tmp')\n"
    )
    root = tmp_path / "blobs"
    store = LocalBlobStore(root)
    assert await store.list() == []
    (root / "tmp").mkdir(parents=True, exist_ok=True)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, str(root), digest, str(weights)],
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 9
    assert await store.list() == []
    assert len(list((root / "tmp").iterdir())) == 1

    async def live_digests(_: Iterable[str]) -> set[str]:
        return set()

    report = await sweep(store, live_digests, older_than_seconds=0)
    assert (report.orphans, report.leftovers) == ((), 1)
    assert list((root / "tmp").iterdir()) == []
    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "into")
