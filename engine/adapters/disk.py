"""Adapter files on local disk: `<root>/<digest>/`, least recently used first out.

The folder is shared with the service, which puts complete, verified folders there by a rename.
This side only reads and removes; what it removes it renames first, so that nobody ever meets
half an adapter.
"""

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Container
from pathlib import Path

import structlog

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE, is_digest

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_TRASH_PREFIX = ".evicted-"


class AdapterDisk:
    """Which adapters lie on disk, and their bytes. Single-threaded, but for `discard`."""

    def __init__(
        self, root: Path, max_bytes: int, *, discard: Callable[[Path], object] = shutil.rmtree
    ) -> None:
        """`discard` deletes a folder that is out of sight already; it may do so on a thread."""
        self._root = root
        self._max_bytes = max_bytes
        self._discard = discard
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_removed = 0
        self._log = structlog.get_logger("engine.adapters")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._adopt_existing()

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters on disk that this process has seen."""
        return sum(self._sizes.values())

    def path(self, digest: str) -> Path:
        """Folder of an adapter, there or not."""
        if not is_digest(digest):
            raise ValueError(f"not an adapter digest: {digest[:80]!r}")
        return self._root / digest

    def find(self, digest: str) -> int | None:
        """Bytes of an adapter that lies complete on disk, else None; counts as a use."""
        size = _folder_bytes(self.path(digest))
        if size is None:
            self._sizes.pop(digest, None)
            return None
        self._sizes[digest] = size
        self._sizes.move_to_end(digest)
        return size

    @property
    def recent(self) -> list[str]:
        """Adapters on disk, the most recently used first; also of the processes before this one."""
        return list(reversed(self._sizes))

    def size(self, digest: str) -> int | None:
        """Bytes of an adapter that was seen on disk, else None; counts as no use."""
        return self._sizes.get(digest)

    def touch(self, digest: str) -> None:
        """Count a use, so that it survives a restart: it is read back from the folder's mtime."""
        if digest in self._sizes:
            self._sizes.move_to_end(digest)
        with contextlib.suppress(OSError):  # gone, or a disk that became read-only
            os.utime(self.path(digest))

    def remove(self, digest: str) -> None:
        """Take an adapter off the disk; harmless if it is not there or cannot be removed."""
        self._sizes.pop(digest, None)
        self._num_removed += 1
        trash = self._root / f"{_TRASH_PREFIX}{digest}-{os.getpid()}-{self._num_removed}"
        try:
            self.path(digest).rename(trash)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._log.warning("not_removed", adapter=digest[:12], reason=str(error))
            return
        self._discard(trash)

    def trim(self, in_use: Container[str]) -> None:
        """Remove adapters not in use, least recently used first, until the rest fits."""
        excess = self.num_bytes - self._max_bytes
        for digest, size in list(self._sizes.items()):
            if excess <= 0:
                return
            if digest not in in_use:
                self.remove(digest)
                excess -= size

    def _adopt_existing(self) -> None:
        found: list[tuple[float, str, int]] = []
        for folder in self._root.iterdir():
            if folder.name.startswith(_TRASH_PREFIX):
                self._discard(folder)
            elif is_digest(folder.name) and (size := _folder_bytes(folder)) is not None:
                found.append((folder.stat().st_mtime, folder.name, size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size


def _folder_bytes(folder: Path) -> int | None:
    try:
        return sum((folder / name).stat().st_size for name in ADAPTER_FILES)
    except OSError:  # not there, or a disk that fails: either way it can't be served from here
        return None
