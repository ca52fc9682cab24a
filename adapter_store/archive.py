"""Take the two files of an adapter out of an uploaded zip, whatever the zip says of itself.

Only `adapter_config.json` and `adapter_model.safetensors` are ever written, under these names; no
path from the archive reaches the file system. Every other member must be harmless, or the whole
archive is refused. The work is bounded before `zipfile` sees the file, since it reads the whole
list of members at once.
"""

import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import MAX_CONFIG_BYTES
from adapter_store.safetensors_header import shown

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_MEMBERS = 1000
MAX_DIRECTORY_BYTES = 1 << 20
MAX_NAME_LENGTH = 255
MAX_RATIO = 50
"""Trained weights hardly compress; a run of zeros does so 1000 to 1."""

_CHUNK_BYTES = 1 << 20
_END_SIGNATURE = b"PK\x05\x06"
_END_RECORD = struct.Struct("<4s4H2LH")
_MAX_COMMENT = 65535
_ZIP64_LOCATOR = b"PK\x06\x07"
_ENCRYPTED_FLAGS = 0x1 | 0x40 | 0x2000
_MALFORMED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
)


@dataclass(frozen=True, slots=True)
class ExtractedAdapter:
    """The two files of an adapter, as written to the caller's folder."""

    config: Path
    weights: Path


def extract_adapter(archive: Path, into: Path, *, max_bytes: int) -> ExtractedAdapter:
    """Write the adapter's two files from the zip `archive` into the folder `into`.

    The files lie at the root of the archive or in one folder of it. `max_bytes` caps the two files
    together, unpacked. Raises AdapterFormatError, and then leaves nothing behind in `into`.
    """
    extracted = ExtractedAdapter(into / CONFIG_NAME, into / WEIGHTS_NAME)
    try:
        with archive.open("rb") as file:
            archive_bytes = _check_end_record(file)
            with zipfile.ZipFile(file) as unzip:
                config, weights = _find_members(unzip.infolist())
                _check_size(config, archive_bytes, MAX_CONFIG_BYTES)
                _check_size(weights, archive_bytes, max_bytes - config.file_size)
                _write_member(unzip, config, extracted.config)
                try:
                    _write_member(unzip, weights, extracted.weights)
                except BaseException:
                    extracted.config.unlink()
                    raise
    except _MALFORMED as error:
        raise AdapterFormatError(
            "invalid_archive", f"the zip archive is damaged ({type(error).__name__})"
        ) from None
    return extracted


def _check_end_record(file: BinaryIO) -> int:
    """Refuse what would make `zipfile` read a long list of members, which it finds as is done here.

    Returns the archive's size in bytes.
    """
    size = file.seek(0, 2)
    tail_start = max(0, size - _END_RECORD.size - _MAX_COMMENT)
    file.seek(tail_start)
    tail = file.read()
    position = tail.rfind(_END_SIGNATURE)
    if position < 0 or position + _END_RECORD.size > len(tail):
        raise AdapterFormatError("not_a_zip", "the archive is not a zip file")
    record = _END_RECORD.unpack_from(tail, position)
    _, disk, directory_disk, _, members, directory_bytes, _, comment_bytes = record
    if position + _END_RECORD.size + comment_bytes != len(tail) or disk or directory_disk:
        raise AdapterFormatError("invalid_archive", "the zip archive does not end where it says")
    file.seek(max(0, tail_start + position - 20))
    if file.read(4) == _ZIP64_LOCATOR or directory_bytes == 0xFFFF_FFFF:
        raise AdapterFormatError(
            "unsupported_archive", "zip64 archives are not read; send the two files themselves"
        )
    if members > MAX_MEMBERS or directory_bytes > MAX_DIRECTORY_BYTES:
        raise AdapterFormatError(
            "too_many_members", f"the archive has {members} members, at most {MAX_MEMBERS} are read"
        )
    return size


def _find_members(
    members: Sequence[zipfile.ZipInfo],
) -> tuple[zipfile.ZipInfo, zipfile.ZipInfo]:
    if len(members) > MAX_MEMBERS:
        raise AdapterFormatError(
            "too_many_members", f"the archive has more than {MAX_MEMBERS} members"
        )
    seen: set[str] = set()
    for member in members:
        _check_member(member)
        folded = unicodedata.normalize("NFKC", member.orig_filename).casefold().rstrip("/")
        if folded in seen:
            raise _unsafe(member, "names the same file as another member")
        seen.add(folded)
    config = _only_one(members, CONFIG_NAME)
    weights = _only_one(members, WEIGHTS_NAME)
    if config.filename.removesuffix(CONFIG_NAME) != weights.filename.removesuffix(WEIGHTS_NAME):
        raise AdapterFormatError(
            "ambiguous_archive", f"{CONFIG_NAME} and {WEIGHTS_NAME} are not in one folder"
        )
    return config, weights


def _check_member(member: zipfile.ZipInfo) -> None:
    # `filename` has been cut at a NUL by zipfile; this one is as it stands in the archive.
    name = member.orig_filename
    parts = name.removesuffix("/").split("/")
    mode = stat.S_IFMT(member.external_attr >> 16)
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise _unsafe(member, "has a name that is too long or has control characters")
    if "\\" in name or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise _unsafe(member, "has a path that leads out of the archive")
    if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _unsafe(member, "is a link or a device")
    if member.flag_bits & _ENCRYPTED_FLAGS:
        raise _unsafe(member, "is encrypted")


def _only_one(members: Sequence[zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    found = [member for member in members if member.filename.split("/")[-1] == name]
    if not found:
        pickles = [m.filename for m in members if m.filename.split("/")[-1] in _PICKLE_NAMES]
        if name == WEIGHTS_NAME and pickles:
            raise AdapterFormatError(
                "not_safetensors",
                f"the archive has only {shown(pickles[0])}; pickles are not opened, save the "
                "adapter as safetensors",
                field=shown(pickles[0], quote=False),
            )
        raise AdapterFormatError("missing_member", f"the archive has no {name}", field=name)
    if len(found) > 1:
        raise AdapterFormatError(
            "ambiguous_archive", f"the archive has {len(found)} files named {name}", field=name
        )
    (member,) = found
    if member.filename.count("/") > 1:
        raise AdapterFormatError(
            "missing_member",
            f"{name} must be at the root of the archive or in one folder of it",
            field=shown(member.filename, quote=False),
        )
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise AdapterFormatError(
            "unsupported_archive", f"{name} is neither stored nor deflated", field=name
        )
    return member


def _check_size(member: zipfile.ZipInfo, archive_bytes: int, max_bytes: int) -> None:
    name = member.filename
    if not 0 <= member.header_offset <= archive_bytes - member.compress_size:
        raise zipfile.BadZipFile("a member lies outside the archive")
    if member.file_size > max_bytes:
        raise AdapterFormatError(
            "archive_too_large",
            f"{shown(name)} has {member.file_size} bytes unpacked, more than is accepted",
            field=shown(name, quote=False),
        )
    if member.file_size > MAX_RATIO * member.compress_size + _CHUNK_BYTES:
        raise AdapterFormatError(
            "zip_bomb",
            f"{shown(name)} unpacks to more than {MAX_RATIO} times its size",
            field=shown(name, quote=False),
        )


def _write_member(unzip: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    # zipfile stops at the size in the list of members, which has been checked, and then at a wrong
    # checksum. A member that is shorter than it says just ends.
    written = 0
    with target.open("xb") as file:
        try:
            with unzip.open(member) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    file.write(chunk)
                    written += len(chunk)
            if written != member.file_size:
                raise zipfile.BadZipFile("a member is shorter than it says")
        except BaseException:
            target.unlink()
            raise


def _unsafe(member: zipfile.ZipInfo, fault: str) -> AdapterFormatError:
    name = shown(member.orig_filename)
    return AdapterFormatError(
        "unsafe_member", f"the member {name} of the archive {fault}", field=name.strip("'")
    )
