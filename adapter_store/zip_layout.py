"""Where the parts of a zip lie: every byte of it belongs to what its list of members names.

A zip is read from its end, so anything may stand before what is read, a whole other archive too,
and programs differ in what they make of such a file. Here it is one archive or none: its members
from the first byte on, end to end, each under the name that the list has for it, then the list,
then the end. What a member says of its own size and checksum is left unread: the list decides.
"""

import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from adapter_store.errors import AdapterFormatError
from adapter_store.shown_text import shown

MAX_MEMBERS = 1000
MAX_DIRECTORY_BYTES = 1 << 20

_END_SIGNATURE = b"PK\x05\x06"
_END_RECORD = struct.Struct("<4s4H2LH")
_MAX_COMMENT = 65535
_ZIP64_LOCATOR = b"PK\x06\x07"
_LOCAL_SIGNATURE = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x8
_NAME_IS_UTF8 = 0x800


@dataclass(frozen=True, slots=True)
class ZipEnd:
    """What the end of a zip says of its list of members, checked against where the end lies."""

    directory_at: int
    """The byte at which the list begins."""
    members: int


def read_end(file: BinaryIO) -> ZipEnd:
    """Read the end record as `zipfile` finds it, before `zipfile` reads the whole list of members.

    Raises AdapterFormatError for a list that is too long, for zip64, and for bytes around the
    archive.
    """
    size = file.seek(0, 2)
    tail_start = max(0, size - _END_RECORD.size - _MAX_COMMENT)
    file.seek(tail_start)
    tail = file.read()
    position = tail.rfind(_END_SIGNATURE)
    if position < 0 or position + _END_RECORD.size > len(tail):
        raise AdapterFormatError("not_a_zip", "the archive is not a zip file")
    record = _END_RECORD.unpack_from(tail, position)
    _, disk, directory_disk, _, members, directory_bytes, directory_at, comment_bytes = record
    if position + _END_RECORD.size + comment_bytes != len(tail) or disk or directory_disk:
        raise _damaged("does not end where it says")
    file.seek(max(0, tail_start + position - 20))
    if file.read(4) == _ZIP64_LOCATOR or directory_bytes == 0xFFFF_FFFF:
        raise AdapterFormatError(
            "unsupported_archive", "zip64 archives are not read; send the two files themselves"
        )
    if members > MAX_MEMBERS or directory_bytes > MAX_DIRECTORY_BYTES:
        raise AdapterFormatError(
            "too_many_members", f"the archive has {members} members, at most {MAX_MEMBERS} are read"
        )
    _check_begins_at(tail_start + position - directory_bytes - directory_at)
    return ZipEnd(directory_at, members)


def check_members(file: BinaryIO, members: Sequence[zipfile.ZipInfo], end: ZipEnd) -> None:
    """Raise AdapterFormatError unless the listed members, end to end, fill all before the list."""
    if len(members) != end.members:
        raise _damaged(f"lists {len(members)} members and says that they are {end.members}")
    in_order = sorted(members, key=lambda member: member.header_offset)
    starts = [member.header_offset for member in in_order]
    if starts:
        _check_begins_at(starts[0])
    for member, next_at in zip(in_order, [*starts[1:], end.directory_at], strict=True):
        _check_member(file, member, next_at)


def _check_begins_at(position: int) -> None:
    if position > 0:
        raise AdapterFormatError(
            "ambiguous_archive",
            f"{position} bytes stand before the first member of the archive, another archive maybe;"
            " send one archive and nothing else",
        )
    if position < 0:
        raise _damaged("lacks its beginning")


def _check_member(file: BinaryIO, member: zipfile.ZipInfo, next_at: int) -> None:
    name = shown(member.orig_filename)
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    signature, _, flags, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    if signature != _LOCAL_SIGNATURE:
        raise _damaged(f"has no member {name} where it says")
    own_name = file.read(name_bytes).decode("utf-8" if flags & _NAME_IS_UTF8 else "cp437")
    if own_name != member.orig_filename:
        raise _damaged(f"lists {name}, which calls itself {shown(own_name)}")
    ends_at = member.header_offset + len(header) + name_bytes + extra_bytes + member.compress_size
    num_bytes = next_at - ends_at
    if num_bytes == 0:
        return
    if num_bytes < 0:
        raise _damaged(f"has a member within the member {name}")
    file.seek(ends_at)
    if not flags & _HAS_DESCRIPTOR or file.read(min(num_bytes, 64)) not in _descriptors(member):
        raise _damaged(f"has {num_bytes} bytes after the member {name} that belong to none")


def _descriptors(member: zipfile.ZipInfo) -> list[bytes]:
    """What may follow a member's data where its header was written before they were known."""
    sizes = member.compress_size, member.file_size
    bodies = [struct.pack("<L2Q", member.CRC, *sizes)]
    if max(sizes) < 2**32:
        bodies.append(struct.pack("<3L", member.CRC, *sizes))
    return [signature + body for body in bodies for signature in (b"", _DESCRIPTOR_SIGNATURE)]


def _damaged(fault: str) -> AdapterFormatError:
    return AdapterFormatError("invalid_archive", f"the zip archive {fault}")
