"""Chooses how the base's layers are quantised."""

import torch

from engine.errors import ConfigError
from engine.quantization.scheme import Scheme

QUANTIZATIONS = ("int8", "fp8", "nf4", "int4")


def choose_scheme(
    name: str | None, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Scheme | None:
    """The scheme of that name for a model's dtype and device; None: weights stay as they are.

    Raises ConfigError for a name that does not exist, a library that is not installed, and what
    the device's kernels cannot do.
    """
    if name is None:
        return None
    # Late: each loads a library that is optional and takes seconds.
    if name in ("int8", "fp8"):
        from engine.quantization.per_channel import PerChannel

        return PerChannel("int8" if name == "int8" else "fp8")
    if name == "nf4":
        from engine.quantization.nf4 import Nf4

        return Nf4()
    if name == "int4":
        from engine.quantization.int4 import Int4

        return Int4(dtype, torch.device(device))
    raise ConfigError(f"quantization must be one of {QUANTIZATIONS}, not {name!r}")
