"""An adapter version as a zip, made while it is sent: what it takes to have it elsewhere.

The zip holds PEFT's two files, byte for byte, and a `manifest.json`; uploading it again gives the
same digest.
"""

import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE

MANIFEST_NAME = "manifest.json"
_CHUNK_BYTES = 1 << 20
_ZIP64_BYTES = 1 << 31
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time of a zip: equal versions are equal archives."""


class _Sink:
    """A file that keeps what is written until it is taken; it cannot seek."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def write(self, data: bytes) -> int:
        self._pending += data
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """What was not taken stays."""

    def take(self) -> bytes:
        taken, self._pending = bytes(self._pending), bytearray()
        return taken


def archive_chunks(
    config: bytes, weights: BinaryIO, num_weights_bytes: int, manifest: bytes
) -> Iterator[bytes]:
    """The zip in pieces of about 1 MiB; `weights` is read on the way and closed at the end."""
    sink = _Sink()
    with weights, zipfile.ZipFile(sink, "w") as archive:
        for name, content in ((MANIFEST_NAME, manifest), (CONFIG_FILE, config)):
            archive.writestr(_member(name), content)
        is_large = num_weights_bytes >= _ZIP64_BYTES
        with archive.open(_member(WEIGHTS_FILE), "w", force_zip64=is_large) as member:
            while chunk := weights.read(_CHUNK_BYTES):
                member.write(chunk)
                yield sink.take()
    yield sink.take()


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _EPOCH)
    member.external_attr = 0o644 << 16
    return member
