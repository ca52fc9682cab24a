"""Adapter files by digest: what a blob store does, and one in a local directory.

A blob is the two files of an adapter. It names nobody: equal uploads of two tenants are one blob,
and only the registry knows who uses it.
"""

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from adapter_store import blob_folder
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE, is_digest
from adapter_store.digest_locks import DigestLocks
from adapter_store.errors import BlobCorrupt, BlobError, BlobMissing

T = TypeVar("T")

_NUM_READERS = 16
_NUM_WRITERS = 4


class BlobStore(Protocol):
    """Immutable adapter files under their digests.

    Any method raises `BlobError` when the store can't be used (a full disk, no permission), or when
    the digest is not 64 lower-case hex digits.
    """

    async def put(self, digest: str, config: bytes, weights: Path) -> None:
        """Store the two files under their digest; `weights` stays the caller's.

        Once it returns they survive a power cut. Good files stored before stay and count as put
        just now; damaged ones are replaced. Raises `BlobCorrupt` if the files given do not hash to
        `digest`.
        """
        ...

    async def fetch(self, digest: str, into: Path) -> None:
        """Make `into` a folder with `adapter_config.json` and `adapter_model.safetensors`.

        The copy is hashed before `into` appears, by a rename. Good files there already stay; they
        are hashed at each fetch, so that a copy which a power cut damaged is replaced.
        Raises `BlobMissing`; or `BlobCorrupt`, and then the blob is set aside, so that putting the
        files again mends it.
        """
        ...

    async def delete(self, digest: str) -> None:
        """Remove the files, whoever uses them; harmless if there are none. See `hold`."""
        ...

    async def list(self, older_than_seconds: float = 0.0) -> list[str]:
        """The digests last put at least so long ago, sorted."""
        ...

    async def clear_leftovers(self, older_than_seconds: float, *, dry_run: bool = False) -> int:
        """Delete what crashes left half-done, and old damaged files; return how many."""
        ...

    def hold(self, digest: str) -> AbstractAsyncContextManager[None]:
        """Keep other holders of the digest out, also in other processes of this host.

        An upload holds over `put` and `Registry.register_version`, a deletion over
        `Registry.is_live` and `delete`: so no blob goes between an upload's put and its commit.
        Hold one at a time, and fetch nothing meanwhile.
        """
        ...


class LocalBlobStore:
    """A `BlobStore` in a directory: `<root>/<first two digits>/<digest>/`.

    Half-written files live in `<root>/tmp`, damaged ones in `<root>/quarantine`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._scratch = root / "tmp"
        self._quarantine = root / "quarantine"
        self._locks = DigestLocks(root / "locks")
        # Threads of its own: asyncio's are few and look names up, too. And of two kinds: fetches
        # that hang on a disk hold up neither uploads nor deletions.
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="blob-reader")
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="blob-writer")

    async def put(self, digest: str, config: bytes, weights: Path) -> None:
        """See `BlobStore.put`."""
        await self._run(
            self._writers, digest, lambda folder: self._put(digest, config, weights, folder)
        )

    async def fetch(self, digest: str, into: Path) -> None:
        """See `BlobStore.fetch`."""
        await self._run(self._readers, digest, lambda folder: self._fetch(digest, folder, into))

    async def delete(self, digest: str) -> None:
        """See `BlobStore.delete`."""
        await self._run(
            self._writers, digest, lambda folder: blob_folder.remove(folder, self._scratch)
        )

    async def list(self, older_than_seconds: float = 0.0) -> list[str]:
        """See `BlobStore.list`."""
        latest = time.time() - older_than_seconds
        with _reported(""):
            return await self._on(
                self._writers,
                lambda: sorted(f.name for f in self._folders() if _modified(f) <= latest),
            )

    async def clear_leftovers(self, older_than_seconds: float, *, dry_run: bool = False) -> int:
        """See `BlobStore.clear_leftovers`."""
        latest = time.time() - older_than_seconds
        with _reported(""):
            return await self._on(self._writers, lambda: self._clear(latest, dry_run))

    def hold(self, digest: str) -> AbstractAsyncContextManager[None]:
        """See `BlobStore.hold`."""
        return self._locks.hold(blob_folder.checked(digest))

    async def _run(self, threads: ThreadPoolExecutor, digest: str, work: Callable[[Path], T]) -> T:
        folder = self._folder(digest)

        def reported() -> T:
            with _reported(digest):
                self._make_root()
                return work(folder)

        return await self._on(threads, reported)

    async def _on(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _folder(self, digest: str) -> Path:
        return self._root / digest[:2] / blob_folder.checked(digest)

    def _make_root(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._scratch.mkdir(exist_ok=True)

    def _put(self, digest: str, config: bytes, weights: Path, folder: Path) -> None:
        if folder.exists():
            if blob_folder.holds(folder, digest):
                os.utime(folder)  # a sweeper must not take it for an old orphan
                return
            blob_folder.set_aside(folder, self._quarantine)
        blob_folder.place(digest, config, weights, folder, self._scratch)

    def _fetch(self, digest: str, folder: Path, into: Path) -> None:
        if into.exists() and blob_folder.holds(into, digest):
            return
        into.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                config = (folder / CONFIG_FILE).read_bytes()
                weights = folder / WEIGHTS_FILE
                blob_folder.place(digest, config, weights, into, into.parent, is_durable=False)
                return
            except (BlobCorrupt, FileNotFoundError):
                if not folder.exists():
                    raise BlobMissing(digest, "no files are stored under this digest") from None
                if not blob_folder.holds(folder, digest):
                    blob_folder.set_aside(folder, self._quarantine)
                    break
            # A put mended the files while they were copied.
        raise BlobCorrupt(digest, "the stored files are damaged and were set aside; upload again")

    def _folders(self) -> Iterator[Path]:
        for folder in self._root.glob("[0-9a-f][0-9a-f]/*"):
            if is_digest(folder.name):
                yield folder

    def _clear(self, latest: float, dry_run: bool) -> int:
        found = [
            leftover
            for folder in (self._scratch, self._quarantine)
            if folder.exists()
            for leftover in folder.iterdir()
            if _modified(leftover) <= latest
        ]
        for leftover in () if dry_run else found:
            blob_folder.remove(leftover, self._scratch)
        return len(found)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # gone since it was listed
        return float("inf")


@contextmanager
def _reported(digest: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        # strerror alone: the message may reach a client, and paths are none of its business
        raise BlobError(digest, f"the blob store failed: {error.strerror}") from error
