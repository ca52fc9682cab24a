"""One adapter's files in one folder: written whole or not at all, and checked against the digest.

A folder appears by a rename, after its files hash to the digest and, in the store itself, are on
the disk. So a folder that is there is complete, whatever process crashed before.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE, hash_files, is_digest
from adapter_store.errors import AdapterFormatError, BlobCorrupt, BlobError

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}
_ATTEMPTS = 5


def checked(digest: str) -> str:
    """Return the digest; raises `BlobError` for anything else."""
    if not is_digest(digest):
        raise BlobError(digest[:64], "not a digest")
    return digest


def holds(folder: Path, digest: str) -> bool:
    """Whether the folder's files hash to `digest`; reads them all."""
    try:
        config = (folder / CONFIG_FILE).read_bytes()
        return hash_files(config, folder / WEIGHTS_FILE) == digest
    except (FileNotFoundError, NotADirectoryError, AdapterFormatError):
        return False


def place(
    digest: str,
    config: bytes,
    weights: Path,
    target: Path,
    scratch: Path,
    *,
    is_durable: bool = True,
) -> None:
    """Make `target` a folder with a copy of the files; the copy is hashed, not the source.

    `scratch` is a folder on the same filesystem. Files at `target` that hash to the digest already
    stay; others are replaced. Without `is_durable` a power cut may damage the copy: that is for
    copies which are hashed again before they are used. Raises `BlobCorrupt` if the source does not
    hash to the digest.
    """
    with staging(digest, scratch) as folder:
        (folder / CONFIG_FILE).write_bytes(config)
        shutil.copyfile(weights, folder / WEIGHTS_FILE)  # copies in the kernel where it can
        if is_durable:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                _sync_file(folder / name)
        publish(digest, folder, target, scratch, is_durable=is_durable)


@contextmanager
def staging(digest: str, scratch: Path) -> Generator[Path]:
    """Make an empty folder in `scratch` for `publish` to move away; deleted at the end if not."""
    with tempfile.TemporaryDirectory(
        prefix=".placing-", dir=scratch, ignore_cleanup_errors=True
    ) as temporary:
        folder = Path(temporary) / digest
        folder.mkdir()
        yield folder


def publish(
    digest: str, folder: Path, target: Path, scratch: Path, *, is_durable: bool = True
) -> None:
    """Move `folder` to `target`; what is there stays or is replaced as with `place`.

    With `is_durable` the caller has brought the files themselves to the disk. Raises `BlobCorrupt`
    if they do not hash to the digest, `BlobError` if others keep replacing what is at `target`.
    """
    if is_durable:
        sync_folder(folder)
    if not holds(folder, digest):
        raise BlobCorrupt(digest, "the files do not hash to their digest")
    target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_ATTEMPTS):
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        else:
            if is_durable:
                sync_folder(target.parent)
            return
        if holds(target, digest):  # another process placed the same files first
            return
        remove(target, scratch)
    raise BlobError(digest, "the files could not be put in place: others keep replacing them")


def remove(folder: Path, scratch: Path) -> None:
    """Make a folder vanish at once, then delete what was in it. Harmless if it isn't there."""
    with tempfile.TemporaryDirectory(
        prefix=".removing-", dir=scratch, ignore_cleanup_errors=True
    ) as temporary:
        try:
            os.rename(folder, Path(temporary) / folder.name)
        except FileNotFoundError:
            return
    sync_folder(folder.parent)


def clear_staged(root: Path) -> None:
    """Delete what killed processes left half-made in `root`, which no process may use meanwhile."""
    for pattern in (".placing-*", ".removing-*"):
        for left in root.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def set_aside(folder: Path, graveyard: Path) -> None:
    """Move a damaged folder away, for people to look at. Harmless if it isn't there."""
    graveyard.mkdir(parents=True, exist_ok=True)
    place_for = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=graveyard))
    try:
        os.rename(folder, place_for)  # over the empty folder just made
    except FileNotFoundError:
        place_for.rmdir()


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
