"""Usage rows on the disk: what the database had not taken when an API process stopped.

One file a stop, in place whole or not at all, a row of JSON a line; no prompt and no key is in it.
API processes write them. The supervisor, which alone holds the data directory, hands them to the
database when the service starts and now and then, and removes a file once all of it is there. A row
is known by its call: one that is read twice, or was written before, counts once.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import structlog

from adapter_store.blob_folder import sync_folder
from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.records import UsageRecord
from adapter_store.registry.transactions import utc_now

_log = structlog.get_logger("loraplex.usage")

_BATCH = 256
_MAX_LINE_BYTES = 4096
"""A row has some 400; what is longer is none, and is not read as one."""
_EVERY_SECONDS = 60.0
"""An API process may have been stopped by itself, while the service goes on."""

Write = Callable[[Sequence[UsageRecord]], Awaitable[int]]
"""Stores rows, drops those that can never be stored, and returns how many it stored. Raises
`RegistryUnavailable`."""


def spill(folder: Path, rows: Iterable[UsageRecord]) -> Path:
    """Write a file of its own and return once it would outlive a power cut; raises `OSError`."""
    path = folder / f"{utc_now():%Y%m%dT%H%M%S%f}-{secrets.token_hex(8)}.jsonl"
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.Encoder().encode_lines(rows))
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync_folder(folder)
    return path


async def keep_restoring(folder: Path, write: Write) -> None:
    """Until cancelled, hand to `write` what lies in the folder.

    Nobody else may write there yet when this begins: what a kill cut short is then a file like the
    others, of which the whole lines count.
    """
    with contextlib.suppress(OSError):  # the next start tries again
        _take_over(folder)
    while True:
        try:
            await restore(folder, write)
        except RegistryUnavailable:
            _log.warning("usage_not_restored")
        await asyncio.sleep(_EVERY_SECONDS)


async def restore(folder: Path, write: Write) -> None:
    """Hand the rows of each file to `write`, the oldest file first, and remove it after its last.

    A file with lines that are no rows is renamed to `*.damaged`, and not read again. One of whose
    rows not a single one can be stored is renamed to `*.refused`: it may be for another database. A
    file that cannot be read holds up no other. Raises `RegistryUnavailable`; the file that was
    being read and those after it are then as they were.
    """
    for path in _files(folder):
        try:
            await _restore_file(path, write)
        except OSError as error:
            _log.error("usage_file_unreadable", file=str(path), error=error.strerror)


async def _restore_file(path: Path, write: Write) -> None:
    num_rows = num_stored = num_damaged = 0
    for lines in _batches(path):
        rows = [row for line in lines if (row := _row_of(line)) is not None]
        num_rows += len(rows)
        num_damaged += len(lines) - len(rows)
        if rows:
            num_stored += await write(rows)
    if num_damaged or not num_rows:
        _set_aside(path, "damaged", num_stored)
    elif not num_stored:
        _set_aside(path, "refused", num_stored)
    else:
        path.unlink()  # noqa: ASYNC240 - an entry of a local folder
        _log.info("usage_restored", file=path.name, rows=num_stored)


def _set_aside(path: Path, fault: str, num_stored: int) -> None:
    kept = path.rename(path.with_suffix(f".{fault}"))
    _log.error(f"usage_file_{fault}", file=str(kept), stored=num_stored)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def _take_over(folder: Path) -> None:
    for part in folder.glob("*.part"):
        part.rename(part.with_suffix(".jsonl"))


def _batches(path: Path) -> Generator[list[bytes]]:
    with path.open("rb") as file:
        lines = iter(partial(file.readline, _MAX_LINE_BYTES), b"")
        while batch := list(islice(lines, _BATCH)):
            yield batch


def _row_of(line: bytes) -> UsageRecord | None:
    try:
        return msgspec.json.decode(line, type=UsageRecord)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
