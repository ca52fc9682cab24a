"""Which blob store a URL means: `s3://bucket/prefix?endpoint=…`, or a local folder if none."""

import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlsplit

from obstore.store import S3Store

from adapter_store.blobs import BlobStore, LocalBlobStore
from adapter_store.blobs_s3 import S3BlobStore

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PARAMETERS = frozenset(("endpoint", "region"))
_CONNECT_TIMEOUT = timedelta(seconds=5)
_READ_TIMEOUT = timedelta(seconds=30)
_REQUEST_TIMEOUT = timedelta(minutes=30)
_RETRY_TIMEOUT = timedelta(seconds=30)
_RETRIES = 3


@dataclass(frozen=True, slots=True)
class BlobBucket:
    """A place in an S3-compatible service. Credentials are the operator's own, of the process's
    environment (`AWS_ACCESS_KEY_ID` and so on, or the instance's role)."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `s3://bucket/prefix?endpoint=http://host:9000&region=eu-west-1`.

        Raises `ValueError`, whose text does not repeat the URL: it may hold a password.
        """
        parts = urlsplit(url)
        if parts.scheme != "s3" or not BUCKET.fullmatch(parts.netloc) or parts.fragment:
            raise ValueError(
                "the blob URL has no form like s3://bucket/prefix?endpoint=https://host&region=name"
            )
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(given.keys() - _PARAMETERS):
            raise ValueError(
                f"the blob URL has a parameter {unknown[0]!r}; only endpoint and region are known"
            )
        endpoint = given.get("endpoint")
        if endpoint is not None and not re.fullmatch(r"https?://[^/@?#]+/?", endpoint):
            raise ValueError(
                "the blob URL's endpoint must be like https://host or http://host:port"
            )
        return cls(parts.netloc, parts.path.strip("/"), endpoint, given.get("region"))

    def open(self, locks: Path) -> S3BlobStore:
        """Return a store; nothing is asked of the service yet."""
        config = {"bucket": self.bucket}
        if self.endpoint is not None:
            config["endpoint"] = self.endpoint.rstrip("/")
        if self.region is not None:
            config["region"] = self.region
        store = S3Store(
            prefix=self.prefix or None,
            config=config,  # pyright: ignore[reportArgumentType]
            client_options={
                "allow_http": (self.endpoint or "").startswith("http://"),
                "connect_timeout": _CONNECT_TIMEOUT,
                "read_timeout": _READ_TIMEOUT,
                "timeout": _REQUEST_TIMEOUT,
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIMEOUT},
        )
        return S3BlobStore(store, locks)


def open_blob_store(url: str | None, folder: Path) -> BlobStore:
    """Return the store of `url`, or a local one in `folder`, where in any case its locks are.

    Raises `ValueError` as `BlobBucket.parse`.
    """
    if url is None:
        return LocalBlobStore(folder)
    return BlobBucket.parse(url).open(folder / "locks")
