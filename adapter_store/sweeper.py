"""Removal of blobs that no version names, and a look for versions whose blobs are gone.

The registry decides what is in use; the blob store's `hold` keeps uploads of the same digest out
while it is asked. So this may run at any time, in any process of the host.
"""

from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass

from adapter_store.blobs import BlobStore

LiveDigests = Callable[[Iterable[str]], Awaitable[Set[str]]]
"""`Registry.live_digests`: those of the digests that a version of any tenant names."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep removed, or would remove."""

    orphans: tuple[str, ...]
    """Digests that no version names."""
    leftovers: int
    """Half-written and damaged files."""


async def remove_unused(
    blobs: BlobStore, live_digests: LiveDigests, digests: Iterable[str]
) -> list[str]:
    """Remove those blobs that no version names, and return their digests."""
    removed: list[str] = []
    for digest in digests:
        async with blobs.hold(digest):
            if not await live_digests([digest]):  # each is asked for under its own lock
                await blobs.delete(digest)
                removed.append(digest)
    return removed


async def sweep(
    blobs: BlobStore, live_digests: LiveDigests, *, older_than_seconds: float, dry_run: bool = False
) -> SweepReport:
    """Remove what uploads and deletes that were cut short left behind.

    Younger files are left alone: an upload may be at work on them.
    """
    stored = await blobs.list(older_than_seconds)
    live = await live_digests(stored)
    orphans = [digest for digest in stored if digest not in live]
    if not dry_run:
        orphans = await remove_unused(blobs, live_digests, orphans)
    leftovers = await blobs.clear_leftovers(older_than_seconds, dry_run=dry_run)
    return SweepReport(tuple(orphans), leftovers)


async def find_missing(
    blobs: BlobStore,
    live_digests: LiveDigests,
    digests_in_use: Callable[[], Awaitable[Iterable[str]]],
) -> list[str]:
    """Return the digests that versions name and whose files are gone: those are to upload again.

    Whether the files are good only a load tells, which hashes them.
    """
    in_use = await digests_in_use()  # first: files are put before their row is written
    stored = set(await blobs.list())
    missing = [digest for digest in in_use if digest not in stored]
    live = await live_digests(missing)  # once more: a version may have been deleted meanwhile
    return [digest for digest in missing if digest in live]
