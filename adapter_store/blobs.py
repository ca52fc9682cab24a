"""Adapter files by digest: the protocol, and a local directory."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol


class BlobStore(Protocol):
    """Immutable adapter files, named by their digest."""

    async def put(self, digest: str, config: bytes, weights: Path) -> None: ...
    async def fetch(self, digest: str, into: Path) -> None: ...
    async def delete(self, digest: str) -> None: ...
    async def list(self) -> list[str]: ...
    def hold(self, digest: str) -> AbstractAsyncContextManager[None]:
        """Keep other holders of the digest out, over processes.

        Upload: hold, `put`, `Registry.register_version`. Deletion: hold, `Registry.is_live`,
        `delete` if not. So no blob goes between an upload's put and its commit.
        """
        ...
