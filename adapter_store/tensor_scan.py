"""Look through the bytes of tensors in a safetensors file, a chunk at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from adapter_store.errors import AdapterFormatError
from adapter_store.safetensors_header import TensorInfo

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _FloatBits:
    word: str
    exponent: int
    """All ones in the exponent: an infinity; the bits of a NaN are more, those of a number less."""
    magnitude: int
    """Every bit but the sign: all zero in 0.0 and -0.0."""


_FLOATS: Mapping[str, _FloatBits] = {
    "F32": _FloatBits("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": _FloatBits("<u2", 0x7C00, 0x7FFF),
    "BF16": _FloatBits("<u2", 0x7F80, 0x7FFF),
}
SERVED_DTYPES = tuple(_FLOATS)


@dataclass(frozen=True, slots=True)
class TensorScan:
    """Whether all values are finite numbers, and whether all are zero."""

    is_finite: bool
    is_zero: bool


def scan_tensor(file: BinaryIO, info: TensorInfo) -> TensorScan:
    """Look at every value of a tensor of one of `SERVED_DTYPES`, by its bits."""
    bits = _FLOATS[info.dtype]
    is_zero = True
    for chunk in _chunks(file, info):
        largest = (chunk.view(bits.word) & bits.magnitude).max()
        if largest >= bits.exponent:
            return TensorScan(is_finite=False, is_zero=False)
        is_zero = is_zero and not largest
    return TensorScan(is_finite=True, is_zero=is_zero)


def tensors_equal(
    file: BinaryIO, info: TensorInfo, other_file: BinaryIO, other: TensorInfo
) -> bool:
    """Whether two tensors hold the same values, each taken as float32.

    The first must be of `SERVED_DTYPES`; it never equals one of another dtype.
    """
    if info.shape != other.shape or other.dtype not in _FLOATS:
        return False
    pairs = zip(_float32_chunks(file, info), _float32_chunks(other_file, other), strict=True)
    return all(np.array_equal(mine.view("<u4"), theirs.view("<u4")) for mine, theirs in pairs)


def _chunks(
    file: BinaryIO, info: TensorInfo, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[NDArray[np.uint8]]:
    position = info.begin
    while position < info.end:
        file.seek(position)
        size = min(chunk_bytes, info.end - position)
        data = file.read(size)
        if len(data) != size:
            raise AdapterFormatError("truncated_file", "the file became shorter while it was read")
        yield np.frombuffer(data, np.uint8)
        position += size


def _float32_chunks(file: BinaryIO, info: TensorInfo) -> Iterator[NDArray[np.float32]]:
    # Chunks of as many values, not bytes, so that those of two dtypes go together.
    word_bytes = np.dtype(_FLOATS[info.dtype].word).itemsize
    for chunk in _chunks(file, info, CHUNK_BYTES // 4 * word_bytes):
        if info.dtype == "F32":
            yield chunk.view("<f4")
        elif info.dtype == "F16":
            yield chunk.view("<f2").astype("<f4")
        else:
            yield (chunk.view("<u2").astype("<u4") << 16).view("<f4")
