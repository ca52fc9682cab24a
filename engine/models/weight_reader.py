"""Reads a checkpoint's tensors by name, and notices those that nobody asked for."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.runner.tensor_file import TensorFile

if TYPE_CHECKING:  # GPU benchmarks run where adapter_store is not installed
    from adapter_store.base_model import BaseModel

_FLOAT_DTYPES = ("F32", "F16", "BF16")
_UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and transformers recomputes."""


class WeightReader:
    """Tensors of one base model."""

    def __init__(
        self, base: "BaseModel", dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._tensors = base.tensors
        self._dtype = dtype
        self._device = device
        self._taken: set[str] = set()
        self._files: dict[Path, TensorFile] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in the model's dtype; raises ConfigError if it is missing or misshapen."""
        stored = self._tensors.get(name)
        if stored is None:
            raise ConfigError(f"the checkpoint lacks the tensor {name!r}")
        if stored.info.dtype not in _FLOAT_DTYPES:
            raise ConfigError(f"{name!r} is {stored.info.dtype}; only {_FLOAT_DTYPES} are served")
        if stored.info.shape != shape:
            raise ConfigError(f"{name!r} is {stored.info.shape}, not {shape} as config.json says")
        self._taken.add(name)
        if stored.file not in self._files:
            self._files[stored.file] = TensorFile(stored.file)
        return self._files[stored.file].tensor(stored.info).to(self._device).to(self._dtype)

    def skip(self, name: str) -> None:
        """Accept a tensor that is known but not needed."""
        self._taken.add(name)

    def check_all_taken(self) -> None:
        """Raise ConfigError if the checkpoint has a tensor that the decoder would ignore."""
        unused = [
            name
            for name in self._tensors
            if name not in self._taken and not name.endswith(_UNUSED_SUFFIXES)
        ]
        if unused:
            raise ConfigError(
                f"the checkpoint has {len(unused)} tensors that config.json does not account for, "
                f"the first is {unused[0]!r}"
            )
