"""One archive and nothing else: what stands before, between or after its members is refused."""

import io
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from adapter_store.archive import extract_adapter
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.errors import AdapterFormatError

CONFIG = b'{"peft_type": "LORA"}'
WEIGHTS = np.random.default_rng(0).bytes(20_000)
MAX_BYTES = 1 << 20

Fill = Callable[[zipfile.ZipFile], None]


def nothing(_: zipfile.ZipFile) -> None:
    return


def writing(name: str) -> Fill:
    return lambda archive: archive.writestr(name, b"x")


def bytes_of(fill: Fill, *, files: bool = True) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        if files:
            archive.writestr(CONFIG_FILE, CONFIG)
            archive.writestr(WEIGHTS_FILE, WEIGHTS)
        fill(archive)
    return written.getvalue()


def after_a_prefix(prefix: bytes) -> bytes:
    """An archive whose list counts the bytes before it, as self-extracting ones do."""
    written = io.BytesIO(prefix)
    with zipfile.ZipFile(written, "a") as archive:
        archive.writestr(CONFIG_FILE, CONFIG)
        archive.writestr(WEIGHTS_FILE, WEIGHTS)
    return written.getvalue()


def hide_bytes(archive: zipfile.ZipFile) -> None:
    """Between two members, with a list that knows of it."""
    assert archive.fp is not None
    archive.fp.seek(archive.start_dir)
    archive.fp.write(b"hidden")
    archive.start_dir = archive.fp.tell()
    archive.writestr("more", b"x")


def list_a_member_within_another(archive: zipfile.ZipFile) -> None:
    inner = bytes_of(writing("inner"), files=False)
    archive.writestr("outer", inner[: inner.index(b"PK\1\2")])
    outer = archive.getinfo("outer")
    with zipfile.ZipFile(io.BytesIO(inner)) as other:
        listed = other.getinfo("inner")
    listed.header_offset = outer.header_offset + 30 + len("outer")
    archive.filelist.append(listed)


def commented_with(comment: bytes) -> Fill:
    def fill(archive: zipfile.ZipFile) -> None:
        archive.comment = comment

    return fill


PLAIN = bytes_of(nothing)
END_AT = PLAIN.rindex(b"PK\5\6")


BEFORE, DAMAGED = "ambiguous_archive", "invalid_archive"
FAULTS: dict[str, tuple[bytes, str, str]] = {
    "two in a row": (PLAIN + PLAIN, BEFORE, f"^{len(PLAIN)} bytes stand before the first member"),
    "another before it": (
        bytes_of(writing("x"), files=False) + PLAIN, BEFORE, "bytes stand before"
    ),
    "another after it": (PLAIN + bytes_of(writing("x"), files=False), BEFORE, "bytes stand before"),
    "one in its comment": (bytes_of(commented_with(PLAIN)), BEFORE, "bytes stand before"),
    "a script before it": (b"#!/bin/sh\n" + PLAIN, BEFORE, "^10 bytes stand before"),
    "a script that it counts": (after_a_prefix(b"#!/bin/sh\n"), BEFORE, "^10 bytes stand before"),
    "another that it counts": (after_a_prefix(PLAIN[:END_AT]), BEFORE, "bytes stand before"),
    "no beginning": (PLAIN[7:], DAMAGED, "lacks its beginning"),
    "bytes after it": (PLAIN + b"\n", DAMAGED, "does not end where it says"),
    "bytes after its comment": (
        bytes_of(commented_with(b"a comment")) + b"b", DAMAGED, "does not end where it says"
    ),
    "bytes between members": (
        bytes_of(hide_bytes), DAMAGED, f"6 bytes after the member '{WEIGHTS_FILE}'"
    ),
    "a member within another": (
        bytes_of(list_a_member_within_another), DAMAGED, "within the member 'outer'"
    ),
    "another name in the member": (
        PLAIN.replace(WEIGHTS_FILE.encode(), b"A" + WEIGHTS_FILE.encode()[1:], 1), DAMAGED,
        f"lists '{WEIGHTS_FILE}', which calls itself 'A",
    ),
    "another number of members": (
        PLAIN[: END_AT + 8] + b"\3\0\3\0" + PLAIN[END_AT + 12 :], DAMAGED,
        "lists 2 members and says that they are 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_more_or_less_than_one_archive_is_refused(fault: str, tmp_path: Path) -> None:
    content, code, message = FAULTS[fault]
    (tmp_path / "a.zip").write_bytes(content)
    (into := tmp_path / "into").mkdir()
    with pytest.raises(AdapterFormatError) as caught:
        extract_adapter(tmp_path / "a.zip", into, max_bytes=MAX_BYTES)
    assert caught.value.code == code
    assert re.search(message, caught.value.message), caught.value.message
    assert list(into.iterdir()) == []


class Unseekable(io.BytesIO):
    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0, /) -> int:
        raise OSError

    def tell(self) -> int:
        raise OSError


@pytest.mark.parametrize("signed", [True, False])
def test_an_archive_that_was_written_to_a_pipe_is_read(signed: bool, tmp_path: Path) -> None:
    """Its members' sizes stand after them, with a signature or, as some write it, without."""
    written = Unseekable()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr(WEIGHTS_FILE, WEIGHTS)
        archive.writestr(CONFIG_FILE, CONFIG)
    data = written.getvalue()
    assert data.count(b"PK\7\x08") == 2
    if not signed:
        data = data.replace(b"PK\7\x08", b"")
        second = data.rindex(b"PK\3\4")
        directory_at = data.index(b"PK\1\2")
        data = bytearray(data)
        struct.pack_into("<L", data, data.rindex(b"PK\1\2") + 42, second)
        struct.pack_into("<L", data, data.rindex(b"PK\5\6") + 16, directory_at)
    (tmp_path / "a.zip").write_bytes(data)
    (into := tmp_path / "into").mkdir()
    extracted = extract_adapter(tmp_path / "a.zip", into, max_bytes=MAX_BYTES)
    assert extracted.weights.read_bytes() == WEIGHTS
