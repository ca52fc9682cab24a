"""`file://`: folders on the service's own machine, under roots that the operator lists."""

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from adapter_store.disk_space import write_all
from adapter_store.errors import SourceError

_CHUNK_BYTES = 1 << 20


async def copy_file(
    folder: Path, name: str, roots: Sequence[Path], into: Path, max_bytes: int
) -> int:
    """Copy a folder's file to `into`, a new path, and return its size in bytes.

    Links are followed first; what they lead to must lie under a root. Raises `SourceError`
    (`source_not_allowed`, `source_not_found`, `source_too_large`), or `OSError` for a full disk.
    """
    return await asyncio.to_thread(_copy, folder / name, roots, into, max_bytes)


def _copy(path: Path, roots: Sequence[Path], into: Path, max_bytes: int) -> int:
    descriptor = _open_under(path, roots)
    with os.fdopen(descriptor, "rb") as source, into.open("xb", buffering=0) as target:
        copied = 0
        while chunk := source.read(_CHUNK_BYTES):
            copied += len(chunk)
            if copied > max_bytes:
                raise SourceError(
                    "source_too_large", f"a source may have {max_bytes} bytes at most"
                )
            write_all(target, chunk, into.parent)
    return copied


def _open_under(path: Path, roots: Sequence[Path]) -> int:
    """Open a file for reading, never by a way that leads out of a root.

    The path is resolved, compared, and then walked without following links: one that is put in
    its way meanwhile is not followed.
    """
    try:
        resolved = path.resolve()
        for root in roots:
            real_root = root.resolve(strict=True)
            if resolved.is_relative_to(real_root):
                return _walk(real_root, resolved.relative_to(real_root).parts)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        raise _not_found() from None
    raise SourceError("source_not_allowed", "the path is under no --adapter-root")


def _walk(root: Path, parts: Sequence[str]) -> int:
    current = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, part in enumerate(parts, start=1):
            # O_NONBLOCK: a pipe must not hold up the thread
            kind = os.O_NONBLOCK if number == len(parts) else os.O_DIRECTORY
            opened = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=current)
            os.close(current)
            current = opened
        if not stat.S_ISREG(os.fstat(current).st_mode):
            raise _not_found()
    except BaseException:
        os.close(current)
        raise
    return current


def _not_found() -> SourceError:
    return SourceError("source_not_found", "there is no such folder with an adapter's two files")
