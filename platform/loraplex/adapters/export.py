"""A version on its way out: its files, verified, as a zip that is never whole anywhere here."""

from functools import partial
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread
import msgspec
from litestar.response import Stream

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.export import archive_chunks
from adapter_store.registry.records import VersionInfo
from loraplex.adapters import schemas
from loraplex.adapters.publishing import upload_folder
from loraplex.services import Services


async def export_version(services: Services, tenant: str, info: VersionInfo) -> Stream:
    """Return the zip as a streamed reply; raises `BlobError` before it begins."""
    root = Path(services.settings.storage.uploads_dir)
    async with services.exports.of(tenant), upload_folder(root) as folder:
        files = folder / "adapter"
        await services.backends.blobs.fetch(info.digest, files)
        config, weights, size = await anyio.to_thread.run_sync(partial(_open, files))
    # The folder is gone; the open file keeps the weights until it is closed.
    manifest = msgspec.json.format(msgspec.json.encode(schemas.manifest(info)))
    return Stream(
        archive_chunks(config, weights, size, manifest),
        media_type="application/zip",
        headers={"content-disposition": f'attachment; filename="{info.name}-{info.version}.zip"'},
    )


def _open(files: Path) -> tuple[bytes, BinaryIO, int]:
    weights = files / WEIGHTS_FILE
    return (files / CONFIG_FILE).read_bytes(), weights.open("rb"), weights.stat().st_size
