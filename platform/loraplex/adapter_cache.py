"""The engine's `Need(digest)`, answered: verified files in the folder that both processes share."""

from pathlib import Path

from adapter_store.blobs import BlobStore
from engine.client import FetchAdapter


def fetch_from(blobs: BlobStore, cache_dir: Path) -> FetchAdapter:
    """Return the callback that puts an adapter's files at `cache_dir/<digest>/`.

    The store hashes the copy before the folder appears, and checks one that is there already; it
    raises `BlobError` when the files cannot be had.
    """

    async def fetch(digest: str) -> None:
        await blobs.fetch(digest, cache_dir / digest)

    return fetch
