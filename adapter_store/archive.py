"""Take the two files of an adapter out of an uploaded zip, whatever the zip says of itself.

Only `adapter_config.json` and `adapter_model.safetensors` are ever written, under these names; no
path from the archive reaches the file system. Every other member must be harmless, or the whole
archive is refused. The work is bounded before `zipfile` sees the file, since it reads the whole
list of members at once. A member's name is the one that the list has: names in extra fields, which
newer versions of `zipfile` take instead, are not looked at.
"""

import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.disk_space import write_all
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import MAX_CONFIG_BYTES
from adapter_store.shown_text import shown
from adapter_store.zip_layout import MAX_MEMBERS, check_members, read_end

_PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_NAME_LENGTH = 255
MAX_RATIO = 50
"""Trained weights hardly compress; a run of zeros does so 1000 to 1."""

_CHUNK_BYTES = 1 << 20
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
    together, unpacked. Raises AdapterFormatError, or OSError where the disk has no room for them,
    and then leaves nothing behind in `into`.
    """
    extracted = ExtractedAdapter(into / CONFIG_FILE, into / WEIGHTS_FILE)
    try:
        with archive.open("rb") as file:
            end = read_end(file)
            with zipfile.ZipFile(file) as unzip:
                config, weights = _find_members(unzip.infolist())
                check_members(file, unzip.infolist(), end)
                _check_size(config, MAX_CONFIG_BYTES)
                _check_size(weights, max_bytes - config.file_size)
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
    config = _only_one(members, CONFIG_FILE)
    weights = _only_one(members, WEIGHTS_FILE)
    if _folder(config) != _folder(weights):
        raise AdapterFormatError(
            "ambiguous_archive", f"{CONFIG_FILE} and {WEIGHTS_FILE} are not in one folder"
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
    found = [member for member in members if _file_name(member) == name]
    if not found:
        pickles = [m.orig_filename for m in members if _file_name(m) in _PICKLE_NAMES]
        if name == WEIGHTS_FILE and pickles:
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
    if member.orig_filename.count("/") > 1:
        raise AdapterFormatError(
            "missing_member",
            f"{name} must be at the root of the archive or in one folder of it",
            field=shown(member.orig_filename, quote=False),
        )
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise AdapterFormatError(
            "unsupported_archive", f"{name} is neither stored nor deflated", field=name
        )
    return member


def _folder(member: zipfile.ZipInfo) -> str:
    return member.orig_filename.rpartition("/")[0]


def _file_name(member: zipfile.ZipInfo) -> str:
    return member.orig_filename.rpartition("/")[2]


def _check_size(member: zipfile.ZipInfo, max_bytes: int) -> None:
    name = member.orig_filename
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
    with target.open("xb", buffering=0) as file:
        try:
            with unzip.open(member) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    write_all(file, chunk, target.parent)
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
