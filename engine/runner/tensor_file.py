"""Tensors of a safetensors file as views of its pages."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # GPU benchmarks run where adapter_store is not installed
    from adapter_store.safetensors_header import TensorInfo

_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class TensorFile:
    """Maps a file; pages are read when a tensor is used, and every tensor keeps the mapping alive.

    The `safetensors` package can do this too, but its `get_tensor` (0.8) leaks two integers for
    every tensor: 27 KB each time an adapter of 30 layers is loaded.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        num_bytes = path.stat().st_size
        try:
            self._bytes = torch.UntypedStorage.from_file(str(path), False, num_bytes)
        except RuntimeError as error:
            raise OSError(f"{path} cannot be mapped: {error}") from error

    def tensor(self, info: "TensorInfo") -> Tensor:
        """The tensor that a header entry describes; F32, F16 or BF16. It must not be written.

        Raises OSError if the file became shorter since its header was read.
        """
        if info.end > self._bytes.nbytes():
            raise OSError(f"{self._path} has {self._bytes.nbytes()} bytes, not {info.end}")
        # A storage of its own: a tensor's first byte need not be a multiple of its dtype's size.
        part = torch.asarray(self._bytes[info.begin : info.end], dtype=torch.uint8)
        return part.view(_DTYPES[info.dtype]).view(info.shape)
