"""From files on disk to a registered version, and back to nothing."""

import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from adapter_store.archive import extract_adapter
from adapter_store.errors import AdapterNotFound
from adapter_store.peft_format import InspectedAdapter, inspect_adapter
from adapter_store.registry.records import (
    AS_THE_BASE,
    RegisteredVersion,
    ServingDefaults,
    TenantInfo,
)
from engine.errors import EngineUnavailable
from loraplex.adapters.upload import Upload
from loraplex.ending_calls import end_calls_of_adapter
from loraplex.errors import ApiError, UploadError
from loraplex.services import Services


def check_serves_adapters(services: Services) -> None:
    """Raise 409 on a service that has no slot for any adapter."""
    if services.backends.engine.info.max_loras == 0:
        raise ApiError(
            409,
            "adapters_disabled",
            "this service serves the base model only: it was started with `--max-loras 0`",
        )


@asynccontextmanager
async def upload_folder(root: Path) -> AsyncGenerator[Path]:
    """Make a folder of one upload; it goes with the upload, also when that is cancelled.

    Raises `UploadError` (503) where the disk takes none.
    """
    with _told_storage():
        folder = Path(await anyio.to_thread.run_sync(partial(tempfile.mkdtemp, dir=root)))
    try:
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))


async def has_adapter(services: Services, tenant: str, name: str) -> bool:
    """Whether the tenant has an adapter of that name; raises `TenantNotFound`."""
    try:
        await services.backends.registry.get_adapter(tenant, name)
    except AdapterNotFound:
        return False
    return True


async def publish(
    services: Services,
    tenant: TenantInfo,
    upload: Upload,
    folder: Path,
    *,
    max_rank: int,
    actor: str,
    serving: ServingDefaults = AS_THE_BASE,
    idempotency_key: str | None = None,
) -> RegisteredVersion:
    """Check, store and register an upload.

    Raises `AdapterFormatError` or `RegistryError`, and `UploadError` (503) where there is no room.

    For the tenant that began it: one that got its name meanwhile does not get its adapter.
    The files are stored before the row that names them; if there is no row then, they go again.
    """
    backends = services.backends
    async with services.inspections.of(tenant.name):
        config, weights = await _files(services, upload, folder)
        inspected: InspectedAdapter = await anyio.to_thread.run_sync(
            partial(
                inspect_adapter,
                config,
                weights,
                backends.base_model,
                max_rank=max_rank,
                max_full_values=backends.engine.info.max_full_values,
            )
        )
    digest = inspected.digest
    async with backends.blobs.hold(digest):
        await backends.blobs.put(digest, config, weights)
        try:
            registered = await backends.registry.register_version(
                tenant.name,
                upload.name,
                inspected,
                backends.base_model.fingerprint,
                publish=upload.publish,
                serving=serving,
                idempotency_key=idempotency_key,
                tenant_created_at=tenant.created_at,
                actor=actor,
            )
        except Exception:
            with suppress(Exception):  # the sweeper takes what stays behind
                await _delete_unless_live(services, digest)
            raise
        if registered.replayed:  # its version may be deleted by now
            await _delete_unless_live(services, digest)
        return registered


async def _delete_unless_live(services: Services, digest: str) -> None:
    if not await services.backends.registry.is_live(digest):
        await services.backends.blobs.delete(digest)


async def delete_adapter(
    services: Services, tenant: str, name: str, *, actor: str, ends_calls: bool = False
) -> None:
    """Delete an adapter everywhere; requests under way finish on it unless they are ended too."""
    unused = await services.backends.registry.delete_adapter(tenant, name, actor=actor)
    if ends_calls:
        end_calls_of_adapter(services.backends.engine, tenant, name)
    await adapter_is_gone(services, tenant, name, unused)


async def adapter_is_gone(services: Services, tenant: str, name: str, unused: list[str]) -> None:
    """Tell the engine, and drop the files, of an adapter that the registry no longer has."""
    services.backends.engine.forget(tenant, name)
    await services.residency.refresh()
    await remove_unused(services, unused)


async def remove_unused(services: Services, digests: list[str]) -> None:
    """Drop adapters that no version names any more, from the engine and from the store."""
    backends = services.backends
    for digest in digests:
        async with backends.blobs.hold(digest):
            if await backends.registry.is_live(digest):  # uploaded again meanwhile
                continue
            try:
                await backends.blobs.delete(digest)
            finally:  # only now, when the engine cannot be given the files once more
                with suppress(EngineUnavailable):  # the next one is told when it joins
                    backends.engine.unload(digest)


async def _files(services: Services, upload: Upload, folder: Path) -> tuple[bytes, Path]:
    if upload.archive is None:
        assert upload.config is not None and upload.weights is not None
        return upload.config, upload.weights
    extract = partial(
        extract_adapter,
        upload.archive,
        folder,
        max_bytes=services.settings.uploads.max_upload_bytes,
    )
    with _told_storage():
        extracted = await anyio.to_thread.run_sync(extract)
    await anyio.to_thread.run_sync(upload.archive.unlink)
    return await anyio.to_thread.run_sync(extracted.config.read_bytes), extracted.weights


@contextmanager
def _told_storage() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UploadError(
            503, "upload_storage", f"the files cannot be stored: {error.strerror}"
        ) from error
