"""One holder of a digest at a time, over the tasks and processes of a host."""

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from adapter_store.errors import BlobError

_POLL_SECONDS = 0.02


class DigestLocks:
    """Locks in a folder, which is made when needed. For one event loop.

    One lock serves all digests with the same first two digits, so hold one digest at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def hold(self, digest: str) -> AsyncGenerator[None]:
        """Keep others out meanwhile; raises `BlobError` where the folder cannot be used."""
        stripe = digest[:2]
        async with self._waiting.setdefault(stripe, asyncio.Lock()):
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self._folder / stripe, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise BlobError(digest, f"the blob store failed: {error.strerror}") from error
            try:
                # Polled: nothing tells when another process lets go, and a thread that waits in
                # flock could not be cancelled.
                while not _try_lock(descriptor):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)
                yield
            finally:
                os.close(descriptor)  # and with it the lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
