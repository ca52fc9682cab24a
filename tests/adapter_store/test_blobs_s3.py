import asyncio
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from obstore.store import S3Store

from adapter_store import blob_folder
from adapter_store.blob_url import BlobBucket, open_blob_store
from adapter_store.blobs import BlobStore, LocalBlobStore
from adapter_store.blobs_s3 import S3BlobStore
from adapter_store.errors import BlobCorrupt, BlobError, BlobMissing
from adapter_store.sweeper import sweep
from tests.support.blobs import CONFIG, adapter_files, tree
from tests.support.s3 import S3Server

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("aws_credentials")]


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.make_bucket()


@pytest.fixture
def store(s3_server: S3Server, bucket: str, tmp_path: Path) -> BlobStore:
    return open_blob_store(
        f"s3://{bucket}/adapters?endpoint={s3_server.endpoint}", tmp_path / "blobs"
    )


def key(digest: str, name: str) -> str:
    return f"adapters/{digest[:2]}/{digest}/{name}"


async def no_version(_: Iterable[str]) -> set[str]:
    return set()


async def test_what_was_put_is_fetched(
    store: BlobStore, s3_server: S3Server, bucket: str, tmp_path: Path
):
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "cache" / digest)
    assert tree(tmp_path / "cache") == {
        f"{digest}/adapter_config.json": CONFIG,
        f"{digest}/adapter_model.safetensors": weights.read_bytes(),
    }
    assert await store.list() == [digest]
    assert await store.list(older_than_seconds=3600) == []
    assert sorted(s3_server.keys(bucket)) == [
        key(digest, "adapter_config.json"),
        key(digest, "adapter_model.safetensors"),
    ]
    await store.delete(digest)
    assert s3_server.keys(bucket) == []
    await store.delete(digest)  # harmless
    with pytest.raises(BlobMissing):
        await store.fetch(digest, tmp_path / "again")


async def test_files_of_several_parts_arrive_whole(
    store: BlobStore, s3_server: S3Server, bucket: str, tmp_path: Path
):
    from adapter_store.digest import hash_files

    weights = tmp_path / "large"
    weights.write_bytes(bytes(range(256)) * (20 << 12))  # 20 MiB: three parts
    digest = hash_files(CONFIG, weights)
    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "into")
    assert blob_folder.holds(tmp_path / "into", digest)


async def test_files_that_are_not_the_digests_are_never_stored(
    store: BlobStore, s3_server: S3Server, bucket: str, tmp_path: Path
):
    digest, weights = adapter_files(tmp_path, 1)
    other, _ = adapter_files(tmp_path, 2)
    await store.put(digest, CONFIG, weights)
    before = s3_server.keys(bucket)
    for wrong, config in ((other, CONFIG), (digest, b'{"peft_type": "LORA"'), (digest, b"")):
        with pytest.raises(BlobCorrupt):
            await store.put(wrong, config, weights)
    with pytest.raises(BlobCorrupt):  # and the good ones are not overwritten
        await store.put(digest, CONFIG, tmp_path / "upload-2.safetensors")
    assert s3_server.keys(bucket) == before
    assert s3_server.unfinished_uploads(bucket) == 0
    await store.fetch(digest, tmp_path / "into")


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "no weights", "bad config", "a huge config"]
)
async def test_a_damaged_blob_is_set_aside_and_a_put_mends_it(
    store: BlobStore, s3_server: S3Server, bucket: str, tmp_path: Path, damage: str
):
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    content = weights.read_bytes()
    weights_key = key(digest, blob_folder.WEIGHTS_FILE)
    if damage == "flip":
        s3_server.put(bucket, weights_key, content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncate":
        s3_server.put(bucket, weights_key, content[:40])
    elif damage == "no weights":
        s3_server.delete(bucket, weights_key)
    elif damage == "bad config":
        s3_server.put(bucket, key(digest, blob_folder.CONFIG_FILE), b"{")
    else:
        s3_server.put(bucket, key(digest, blob_folder.CONFIG_FILE), b"{}" + b" " * (2 << 20))
    with pytest.raises(BlobCorrupt) as caught:
        await store.fetch(digest, tmp_path / "into")
    assert caught.value.digest == digest
    assert not (tmp_path / "into").exists()
    assert all(k.startswith(f"adapters/quarantine/{digest}.") for k in s3_server.keys(bucket))
    assert s3_server.keys(bucket)
    with pytest.raises(BlobMissing):
        await store.fetch(digest, tmp_path / "into")
    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "into")
    assert blob_folder.holds(tmp_path / "into", digest)


async def test_a_blob_that_is_mended_while_it_is_fetched_is_not_set_aside(
    store: BlobStore, s3_server: S3Server, bucket: str, tmp_path: Path
):
    digest, weights = adapter_files(tmp_path, 1)
    await store.put(digest, CONFIG, weights)
    s3_server.put(bucket, key(digest, blob_folder.WEIGHTS_FILE), b"damaged")
    async with store.hold(digest):  # an upload of the same files is at work
        fetching = asyncio.create_task(store.fetch(digest, tmp_path / "into"))
        await store.put(digest, CONFIG, weights)
    await fetching
    assert blob_folder.holds(tmp_path / "into", digest)
    assert not [k for k in s3_server.keys(bucket) if "quarantine" in k]


async def test_a_sweep_removes_what_no_version_names_and_what_is_half_done(
    store: BlobStore, s3_server: S3Server, bucket: str, tmp_path: Path
):
    live, weights = adapter_files(tmp_path, 1)
    orphan, other_weights = adapter_files(tmp_path, 2)
    half, _ = adapter_files(tmp_path, 3)
    await store.put(live, CONFIG, weights)
    await store.put(orphan, CONFIG, other_weights)
    s3_server.put(bucket, key(half, blob_folder.WEIGHTS_FILE), b"its config never came")
    s3_server.put(bucket, f"adapters/quarantine/{half}.00/adapter_config.json", b"{")
    s3_server.put(bucket, "adapters/README.txt", b"not ours")
    s3_server.put(bucket, f"elsewhere/{half[:2]}/{half}/adapter_config.json", b"not ours")

    async def live_digests(digests: Iterable[str]) -> set[str]:
        return {live}.intersection(digests)

    young = await sweep(store, live_digests, older_than_seconds=3600)
    assert (young.orphans, young.leftovers) == ((), 0)
    dry = await sweep(store, live_digests, older_than_seconds=0, dry_run=True)
    assert (dry.orphans, dry.leftovers) == ((orphan,), 2)
    assert len(await store.list()) == 2
    assert await sweep(store, live_digests, older_than_seconds=0) == dry
    assert sorted(s3_server.keys(bucket)) == sorted(
        [
            key(live, "adapter_config.json"),
            key(live, "adapter_model.safetensors"),
            "adapters/README.txt",
            f"elsewhere/{half[:2]}/{half}/adapter_config.json",
        ]
    )


@pytest.mark.parametrize("digest", ["", "..", "../../x", "A" * 64, "a" * 64 + "\n", "a/" * 32])
async def test_only_digests_become_keys(store: BlobStore, tmp_path: Path, digest: str):
    _, weights = adapter_files(tmp_path, 1)
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


@pytest.mark.parametrize("fault", ["no service", "no bucket"])
async def test_a_store_that_does_not_answer_is_a_blob_error_that_tells_no_address(
    s3_server: S3Server, tmp_path: Path, fault: str
):
    endpoint = s3_server.endpoint if fault == "no bucket" else "http://127.0.0.1:9"
    raw = S3Store(
        "no-such-bucket", endpoint=endpoint, client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )  # fmt: skip
    store = S3BlobStore(raw, tmp_path / "locks")
    digest, weights = adapter_files(tmp_path, 1)
    calls = [store.put(digest, CONFIG, weights), store.list(), store.clear_leftovers(0)]
    if fault == "no service":
        calls.append(store.fetch(digest, tmp_path / "into"))
    for call in calls:
        with pytest.raises(BlobError) as caught:
            await call
        assert "127.0.0.1" not in caught.value.message
    assert not (tmp_path / "into").exists()


def test_a_blob_url_says_where_the_bucket_is(tmp_path: Path):
    assert BlobBucket.parse("s3://my-bucket/some/prefix/?endpoint=http://h:9000") == BlobBucket(
        "my-bucket", "some/prefix", "http://h:9000", None
    )
    assert BlobBucket.parse("s3://my-bucket?region=eu-west-1") == BlobBucket(
        "my-bucket", "", None, "eu-west-1"
    )
    assert isinstance(open_blob_store(None, tmp_path), LocalBlobStore)


@pytest.mark.parametrize(
    "url",
    [
        "", "my-bucket", "gs://my-bucket", "s3:///prefix", "s3://Bucket", "s3://key:secret@bucket",
        "s3://bucket?endpoint=ftp://h", "s3://bucket?endpoint=http://u:p@h", "s3://bucket?key=x",
        "s3://bucket#x",
    ],
)  # fmt: skip
def test_a_malformed_blob_url_is_refused_without_being_repeated(url: str):
    with pytest.raises(ValueError, match="blob URL") as caught:
        BlobBucket.parse(url)
    assert "secret" not in str(caught.value)


async def test_a_put_that_was_cut_short_is_no_blob_and_the_sweeper_finds_it(
    store: BlobStore, s3_server: S3Server, bucket: str, tmp_path: Path
):
    digest, weights = adapter_files(tmp_path, 1)
    code = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "import obstore\n"
        "from adapter_store.blob_url import open_blob_store\n"
        "from tests.support.blobs import CONFIG\n"
        "put = obstore.put_async\n"
        "async def put_or_die(store, path, *rest, **options):\n"
        "    if path.endswith('.json'):\n"
        "        os._exit(9)\n"
        "    return await put(store, path, *rest, **options)\n"
        "obstore.put_async = put_or_die\n"
        "url, folder, digest, weights = sys.argv[1:]\n"
        "store = open_blob_store(url, Path(folder))\n"
        "asyncio.run(store.put(digest, CONFIG, Path(weights)))\n"
    )
    url = f"s3://{bucket}/adapters?endpoint={s3_server.endpoint}"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, url, str(tmp_path / "blobs"), digest, str(weights)],
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 9
    assert s3_server.keys(bucket) == [key(digest, "adapter_model.safetensors")]
    assert await store.list() == []
    with pytest.raises(BlobMissing):
        await store.fetch(digest, tmp_path / "into")
    report = await sweep(store, no_version, older_than_seconds=0)
    assert (report.orphans, report.leftovers) == ((), 1)
    assert s3_server.keys(bucket) == []
    await store.put(digest, CONFIG, weights)
    await store.fetch(digest, tmp_path / "into")
