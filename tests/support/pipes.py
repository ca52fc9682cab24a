"""A slow disk, played by the file system: whoever reads a pipe waits until it is answered."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pipe:
    """In the place of an adapter's config in the blob store."""

    path: Path
    content: bytes

    @staticmethod
    def in_place_of(config: Path) -> "Pipe":
        content = config.read_bytes()
        config.unlink()
        os.mkfifo(config)
        return Pipe(config, content)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for it."""
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            assert error.errno == errno.ENXIO
            return False
        return True

    def answer(self) -> None:
        """Let whoever waits for it have it; fails if nobody does."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.content)
