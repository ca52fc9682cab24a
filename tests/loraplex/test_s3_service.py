"""The service with its adapters' files in a bucket."""

from pathlib import Path

import pytest

from adapter_store.blob_url import open_blob_store
from adapter_store.errors import BlobCorrupt, BlobMissing
from loraplex.adapter_cache import fetch_from
from tests.support.s3 import S3Server
from tests.support.service import adapter_files, running_service

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("aws_credentials")]


async def test_an_adapters_files_come_and_go_with_it_and_a_new_upload_mends_them(
    tmp_path: Path, s3_server: S3Server
):
    bucket = s3_server.make_bucket()
    url = f"s3://{bucket}/adapters?endpoint={s3_server.endpoint}"
    blobs = open_blob_store(url, tmp_path / "blobs")
    fetch = fetch_from(blobs, tmp_path / "cache")
    async with (
        running_service(tmp_path, blobs=blobs) as service,
        service.client("acme:tenant") as client,
    ):
        digest = (await service.upload("a"))["digest"]
        await fetch(digest)
        assert len(list((tmp_path / "cache" / digest).iterdir())) == 2
        [weights] = [key for key in s3_server.keys(bucket) if key.endswith(".safetensors")]

        s3_server.put(bucket, weights, b"damaged")
        await fetch(digest)  # the good copy in the cache serves on
        fresh = fetch_from(blobs, tmp_path / "fresh")
        with pytest.raises(BlobCorrupt):
            await fresh(digest)
        with pytest.raises(BlobMissing):
            await fresh(digest)
        assert (await service.upload("a"))["unchanged"] is True
        await fresh(digest)

        assert (await client.delete("/v1/adapters/a")).status_code == 204
        assert await blobs.list() == []
        left = s3_server.keys(bucket)
        assert left and all("/quarantine/" in key for key in left)


async def test_a_bucket_that_does_not_answer_is_a_503_and_no_version(
    tmp_path: Path, s3_server: S3Server
):
    url = f"s3://no-such-bucket-here?endpoint={s3_server.endpoint}"
    blobs = open_blob_store(url, tmp_path / "blobs")
    async with (
        running_service(tmp_path, blobs=blobs) as service,
        service.client("acme:tenant") as client,
    ):
        config, weights = adapter_files()
        reply = await client.post(
            "/v1/adapters", data={"name": "a"}, files={"config": config, "weights": weights}
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "adapter_unavailable")
        assert (await client.get("/v1/adapters")).json()["data"] == []
