"""Writes that leave the registry room: on a full disk it could not write either."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

_RESERVED_BYTES = 512 * 2**20
_RESERVED_SHARE = 20
"""This much of the disk stays free, or a twentieth of it if that is less. Without room for the
registry nobody could be served."""


def write_all(file: BinaryIO, data: bytes | bytearray, folder: Path) -> None:
    """Write to a file in `folder`; raises `OSError` (ENOSPC) before the disk is full."""
    disk = os.statvfs(folder)
    reserve = min(_RESERVED_BYTES, disk.f_blocks * disk.f_frsize // _RESERVED_SHARE)
    if disk.f_bavail * disk.f_frsize - len(data) < reserve:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
