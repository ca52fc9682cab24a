"""Read and check the header of a safetensors file, without its tensors.

Layout (https://huggingface.co/docs/safetensors): 8 bytes with the header's length (little endian),
the header as JSON, then the tensors' bytes. The `safetensors` package will not do for that: it
reads whole files, names no tensor in its errors, and accepts two tensors of one name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from adapter_store.errors import AdapterFormatError
from adapter_store.json_words import in_json_words
from adapter_store.shown_text import shown
from adapter_store.unique_names import RepeatedName, load_unique

MAX_HEADER_BYTES = 100_000_000
"""The cap of the `safetensors` package itself."""

# A zip (torch.save since 1.6) and pickle protocols 2 to 5. A sound header's length may begin so
# too, therefore this only explains a length that cannot be.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `begin` and `end` are absolute byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The tensors of a file in the order of their bytes, and the size of the file in bytes."""

    tensors: Mapping[str, TensorInfo]
    file_size: int


# Bounds on the numbers keep their product cheap, whatever the file says.
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]


def read_header(path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Read the header of the file at `path`.

    Every name is there once, every tensor's bytes fit its dtype and shape, and the tensors fill the
    rest of the file without a gap or an overlap. Raises AdapterFormatError with the tensor's name.
    """
    with path.open("rb") as file:
        file_size = file.seek(0, 2)
        file.seek(0)
        raw = _read_raw_header(file, file_size, max_header_bytes)
    body_start = 8 + len(raw)
    entries = _decode_entries(raw)
    tensors: dict[str, TensorInfo] = {}
    position = body_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = (body_start + offset for offset in entry.data_offsets)
        _check_size(name, entry)
        if begin != position:
            fault = "overlaps another tensor" if begin < position else "leaves a gap before it"
            raise _invalid(f"the tensor {shown(name)} {fault}", name)
        if end > file_size:
            raise AdapterFormatError(
                "truncated_file",
                f"the file ends inside the tensor {shown(name)}",
                field=shown(name, quote=False),
            )
        tensors[name] = TensorInfo(entry.dtype, tuple(entry.shape), begin, end)
        position = end
    if position != file_size:
        raise _invalid(f"{file_size - position} bytes follow the last tensor")
    return SafetensorsHeader(tensors, file_size)


def _read_raw_header(file: BinaryIO, file_size: int, max_header_bytes: int) -> bytes:
    start = file.read(8)
    if len(start) < 8:
        raise AdapterFormatError("truncated_file", "the weights file is shorter than 8 bytes")
    length = int.from_bytes(start, "little")
    if length > file_size - 8:
        if start.startswith(_PICKLE_STARTS):
            raise AdapterFormatError(
                "not_safetensors",
                "the weights look like a PyTorch pickle; only safetensors files are read",
            )
        raise AdapterFormatError(
            "truncated_file",
            f"the safetensors header says {length} bytes, the file has {file_size - 8} left",
        )
    if length > max_header_bytes:
        raise AdapterFormatError(
            "header_too_large",
            f"the safetensors header has {length} bytes, at most {max_header_bytes} are read",
        )
    raw = file.read(length)
    if len(raw) != length:
        raise AdapterFormatError("truncated_file", "the file became shorter while it was read")
    if not raw.startswith(b"{"):
        raise _invalid("it does not begin with '{'")
    return raw


def _decode_entries(raw: bytes) -> dict[str, _Entry]:
    try:
        fields: Any = load_unique(raw)
    except RepeatedName as error:
        raise _invalid(f"the name {shown(error.name)} is there twice", error.name) from None
    except (ValueError, RecursionError) as error:
        raise _invalid(f"it is not JSON ({type(error).__name__})") from None
    metadata = fields.pop("__metadata__", None)
    if metadata is not None:
        try:
            msgspec.convert(metadata, dict[str, str])
        except msgspec.ValidationError:
            raise _invalid("`__metadata__` must map text to text") from None
    entries: dict[str, _Entry] = {}
    for name, value in fields.items():
        try:
            name.encode()
            entries[name] = msgspec.convert(value, _Entry)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            reason = shown(in_json_words(str(error)), quote=False)
            raise _invalid(f"the entry of the tensor {shown(name)}: {reason}", name) from None
    return entries


def _check_size(name: str, entry: _Entry) -> None:
    begin, end = entry.data_offsets
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise _invalid(f"the tensor {shown(name)} has an unknown dtype {shown(entry.dtype)}", name)
    if math.prod(entry.shape) * bits != (end - begin) * 8:
        raise _invalid(
            f"the tensor {shown(name)} has {end - begin} bytes, which is not what its dtype "
            f"{entry.dtype} and its shape {shown(str(entry.shape), quote=False)} take",
            name,
        )


def _invalid(fault: str, name: str | None = None) -> AdapterFormatError:
    return AdapterFormatError(
        "invalid_header",
        f"the safetensors header is not valid: {fault}",
        field=None if name is None else shown(name, quote=False),
    )
