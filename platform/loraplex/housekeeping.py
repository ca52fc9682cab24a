"""Now and then: remove the blobs that no version names, which crashes leave behind; write what may
wait.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import structlog

from adapter_store.blobs import BlobStore
from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.registry import Registry
from adapter_store.sweeper import SweepReport, sweep

_log = structlog.get_logger("loraplex.housekeeping")

FIRST_SECONDS = 60.0
EVERY_SECONDS = 3600.0
NOTES_SECONDS = 60.0
MIN_AGE_SECONDS = 3600.0
"""Younger blobs are left alone: their upload may be about to register them. One that takes longer
is safe too, for it holds their lock."""


@asynccontextmanager
async def keeping_house(registry: Registry, blobs: BlobStore) -> AsyncGenerator[None]:
    """Keep house and registry meanwhile; at the end, write when keys were used last."""
    keeping = asyncio.gather(keep_house(registry, blobs), keep_registry(registry))
    try:
        yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        with suppress(RegistryUnavailable):
            await registry.record_key_use()


async def keep_house(
    registry: Registry,
    blobs: BlobStore,
    *,
    first_seconds: float = FIRST_SECONDS,
    every_seconds: float = EVERY_SECONDS,
    min_age_seconds: float = MIN_AGE_SECONDS,
) -> None:
    """Sweep until cancelled; a store or a registry that fails is tried again later."""
    await asyncio.sleep(first_seconds)
    while True:
        try:
            report = await sweep_orphans(registry, blobs, min_age_seconds)
            if report is not None and (report.orphans or report.leftovers):
                _log.info("swept", orphans=len(report.orphans), leftovers=report.leftovers)
        except Exception as error:  # whatever it was: nobody would miss a chore that has ended
            _log.warning("sweep_failed", error=type(error).__name__)
        await asyncio.sleep(every_seconds)


async def keep_registry(registry: Registry, *, every_seconds: float = NOTES_SECONDS) -> None:
    """Until cancelled, write what may wait: when keys were used. Drop old replies and sessions."""
    while True:
        await asyncio.sleep(every_seconds)
        try:
            await registry.record_key_use()
            await registry.purge_replies()
            await registry.purge_logins()
        except Exception as error:  # whatever it was: notes may wait a minute more
            _log.warning("notes_not_written", error=type(error).__name__)


async def sweep_orphans(
    registry: Registry, blobs: BlobStore, min_age_seconds: float, *, dry_run: bool = False
) -> SweepReport | None:
    """Sweep once; None, and nothing swept, if the registry names none of the blobs.

    It is another registry then, or a new one: what the blobs are for would be lost for good.
    """
    found = await sweep(
        blobs, registry.live_digests, older_than_seconds=min_age_seconds, dry_run=True
    )
    if found.orphans and len(found.orphans) == len(await blobs.list()):
        _log.warning("blobs_of_another_registry", blobs=len(found.orphans))
        return None
    if dry_run:
        return found
    return await sweep(blobs, registry.live_digests, older_than_seconds=min_age_seconds)
