"""The data directory: where everything lies that outlives the process, held by one service."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from adapter_store.blob_folder import clear_staged


class DataDirError(Exception):
    """The data directory cannot be used; the message names the fix."""


@dataclass(frozen=True, slots=True)
class DataDir:
    """Paths under the data directory."""

    root: Path

    @property
    def database_url(self) -> str:
        """The embedded registry."""
        return f"sqlite:///{self.root / 'registry.db'}"

    @property
    def blobs(self) -> Path:
        """Adapters by digest: the truth."""
        return self.root / "blobs"

    @property
    def cache(self) -> Path:
        """Adapters by digest, verified, for the engine: may be deleted when nothing runs."""
        return self.root / "cache"

    @property
    def uploads(self) -> Path:
        """Uploads on their way in; emptied at each start."""
        return self.root / "uploads"

    @property
    def usage(self) -> Path:
        """Usage rows that the database had not taken at a stop; emptied into it."""
        return self.root / "usage"

    @property
    def admin_key_file(self) -> Path:
        """The generated admin key, mode 0600."""
        return self.root / "admin.key"


def default_data_dir() -> Path:
    """Return `$XDG_DATA_HOME/loraplex`, or its usual place."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "loraplex"


@contextlib.contextmanager
def open_data_dir(root: Path) -> Generator[DataDir]:
    """Make the data directory and hold it; raises `DataDirError` if another service does."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = DataDir(root.resolve())
        for folder in (data.blobs, data.cache, data.usage):
            folder.mkdir(exist_ok=True, mode=0o700)
        lock = FileLock(data.root / "lock", mode=0o600)
        lock.acquire(blocking=False)
    except Timeout:
        raise DataDirError(
            f"{root} is in use by another loraplex service; stop it, or give another --data-dir"
        ) from None
    except OSError as error:
        raise DataDirError(f"{root} cannot be used as --data-dir: {error}") from None
    try:
        shutil.rmtree(data.uploads, ignore_errors=True)
        data.uploads.mkdir(exist_ok=True, mode=0o700)
        clear_staged(data.cache)
        yield data
    finally:
        lock.release()


@contextlib.contextmanager
def run_directory() -> Generator[Path]:
    """Make a short-lived 0700 folder whose path is short enough for a Unix socket."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), "/run/user/" + str(os.getuid()), "/tmp"]  # noqa: S108
    parent = next(
        path for path in (*candidates, tempfile.gettempdir())
        if path and len(path) < 60 and os.access(path, os.W_OK | os.X_OK)
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="loraplex-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_admin_key(data: DataDir, key: str) -> None:
    """Keep a generated admin key where only its owner can read it."""
    file = os.open(data.admin_key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "w") as handle:
        handle.write(key + "\n")
