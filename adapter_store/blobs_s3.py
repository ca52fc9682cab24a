"""Adapter files by digest in an S3-compatible bucket.

`<prefix>/<first two digits>/<digest>/` holds the two files as they are, the config last: it marks
the blob as complete. S3 has no renames, but an object appears whole or not at all, and any config
of a digest goes with any weights of it, so a half-done overwrite harms nobody.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from adapter_store import blob_folder
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE, AdapterHasher, is_digest
from adapter_store.digest_locks import DigestLocks
from adapter_store.errors import AdapterFormatError, BlobCorrupt, BlobError, BlobMissing
from adapter_store.peft_config import MAX_CONFIG_BYTES, PeftConfig, parse_config

_CHUNK_BYTES = 8 << 20
_QUARANTINE = "quarantine"
_CONCURRENT_PARTS = 4
"""Of one file's upload; each holds a chunk in memory."""


class S3BlobStore:
    """A `BlobStore` in a bucket. Holds are files in `locks`: they reach over one host.

    What an upload that was killed had sent in parts is not listed by S3 and so not swept: give the
    bucket a lifecycle rule that aborts incomplete multipart uploads.
    """

    def __init__(self, store: S3Store, locks: Path) -> None:
        self._store = store
        self._locks = DigestLocks(locks)

    async def put(self, digest: str, config: bytes, weights: Path) -> None:
        """See `BlobStore.put`. The files are sent again also where good ones are stored: to see
        that they are good would take as long."""
        prefix = _prefix(digest)
        try:
            peft_config = parse_config(config)
        except AdapterFormatError:
            raise _not_the_digests(digest) from None
        with _reported(digest):
            async with aclosing(_hashed_chunks(digest, peft_config, weights)) as chunks:
                await obstore.put_async(
                    self._store, f"{prefix}/{WEIGHTS_FILE}", chunks,
                    chunk_size=_CHUNK_BYTES, max_concurrency=_CONCURRENT_PARTS,
                )  # fmt: skip
            await obstore.put_async(self._store, f"{prefix}/{CONFIG_FILE}", config)

    async def fetch(self, digest: str, into: Path) -> None:
        """See `BlobStore.fetch`."""
        prefix = _prefix(digest)
        if await asyncio.to_thread(blob_folder.holds, into, digest):
            return
        with _reported(digest):
            await asyncio.to_thread(into.parent.mkdir, parents=True, exist_ok=True)
            try:
                await self._fetch(digest, prefix, into)
                return
            except (BlobCorrupt, FileNotFoundError):
                if not await self._exists(f"{prefix}/{CONFIG_FILE}"):
                    raise BlobMissing(digest, "no files are stored under this digest") from None
            # Held, so that no upload of this host is taken for what is damaged.
            async with self.hold(digest):
                try:
                    await self._fetch(digest, prefix, into)
                    return
                except (BlobCorrupt, FileNotFoundError):
                    await self._set_aside(digest, prefix)
        raise BlobCorrupt(digest, "the stored files are damaged and were set aside; upload again")

    async def delete(self, digest: str) -> None:
        """See `BlobStore.delete`."""
        prefix = _prefix(digest)
        with _reported(digest):
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                await self._remove(f"{prefix}/{name}")

    async def list(self, older_than_seconds: float = 0.0) -> list[str]:
        """See `BlobStore.list`."""
        latest = time.time() - older_than_seconds
        with _reported(""):
            return sorted(
                digest
                for digest, files in (await self._blobs()).items()
                if CONFIG_FILE in files and files[CONFIG_FILE].timestamp() <= latest
            )

    async def clear_leftovers(self, older_than_seconds: float, *, dry_run: bool = False) -> int:
        """See `BlobStore.clear_leftovers`."""
        latest = time.time() - older_than_seconds
        with _reported(""):
            found = [
                f"{_prefix(digest)}/{name}"
                for digest, files in (await self._blobs()).items()
                if CONFIG_FILE not in files
                for name, modified in files.items()
                if modified.timestamp() <= latest
            ]
            found += [
                path
                for path, modified in await self._objects(_QUARANTINE)
                if modified.timestamp() <= latest
            ]
            for path in () if dry_run else found:
                await self._remove(path)
        return len(found)

    def hold(self, digest: str) -> AbstractAsyncContextManager[None]:
        """See `BlobStore.hold`."""
        return self._locks.hold(blob_folder.checked(digest))

    async def _fetch(self, digest: str, prefix: str, into: Path) -> None:
        with blob_folder.staging(digest, into.parent) as folder:
            await self._download(f"{prefix}/{CONFIG_FILE}", folder / CONFIG_FILE, MAX_CONFIG_BYTES)
            await self._download(f"{prefix}/{WEIGHTS_FILE}", folder / WEIGHTS_FILE, None)
            # A copy, hashed again at each fetch: it need not outlast a power cut.
            publish = partial(blob_folder.publish, is_durable=False)
            await asyncio.to_thread(publish, digest, folder, into, into.parent)

    async def _download(self, path: str, target: Path, max_bytes: int | None) -> None:
        result = await obstore.get_async(self._store, path)
        if max_bytes is not None and result.meta["size"] > max_bytes:
            raise BlobCorrupt(target.parent.name, "a stored file is larger than it can be")
        with target.open("xb") as file:
            async for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
                await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(file.flush)

    async def _set_aside(self, digest: str, prefix: str) -> None:
        grave = f"{_QUARANTINE}/{digest}.{secrets.token_hex(4)}"
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            try:
                await obstore.rename_async(self._store, f"{prefix}/{name}", f"{grave}/{name}")
            except FileNotFoundError:
                continue

    async def _exists(self, path: str) -> bool:
        try:
            await obstore.head_async(self._store, path)
        except FileNotFoundError:
            return False
        return True

    async def _remove(self, path: str) -> None:
        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:  # S3 itself does not mind
            return

    async def _blobs(self) -> dict[str, dict[str, datetime]]:
        """The files of each digest, complete or not, with the time of their last put."""
        found: dict[str, dict[str, datetime]] = {}
        for path, modified in await self._objects():
            parts = path.split("/")
            if len(parts) == 3 and is_digest(parts[1]) and parts[0] == parts[1][:2]:
                found.setdefault(parts[1], {})[parts[2]] = modified
        return found

    async def _objects(self, prefix: str | None = None) -> Sequence[tuple[str, datetime]]:
        return [
            (meta["path"], meta["last_modified"])
            async for page in obstore.list(self._store, prefix, chunk_size=1000)
            for meta in page
        ]


async def _hashed_chunks(
    digest: str, config: PeftConfig, weights: Path
) -> AsyncGenerator[bytes, None]:
    """The file's bytes; raises `BlobCorrupt` at their end, so that nothing wrong is stored."""
    with weights.open("rb") as file:
        hasher = AdapterHasher(config, os.fstat(file.fileno()).st_size)
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            await asyncio.to_thread(hasher.update, chunk)
            yield chunk
    try:
        found = hasher.hexdigest()
    except AdapterFormatError:
        found = None
    if found != digest:
        raise _not_the_digests(digest)


def _prefix(digest: str) -> str:
    return f"{blob_folder.checked(digest)[:2]}/{digest}"


def _not_the_digests(digest: str) -> BlobCorrupt:
    return BlobCorrupt(digest, "the files do not hash to their digest")


@contextmanager
def _reported(digest: str) -> Generator[None]:
    try:
        yield
    except BaseError as error:
        # The library's text has addresses and the server's reply; the cause keeps it for the log.
        raise BlobError(digest, f"the blob store failed: {type(error).__name__}") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BlobError(digest, f"the blob store failed: {reason}") from error
