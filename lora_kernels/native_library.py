"""Finds and loads the compiled kernel, which is built at install where there is a C++ compiler."""

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# PyTorch brings the OpenMP library whose symbols the kernel takes, and whose threads it shares.
import torch

from lora_kernels.errors import KernelUnavailable

MODULE = "lora_kernels._native"
ABI_VERSION = 1
"""Changes with the layouts and signatures in native/add_lora.cpp, and there."""

AddLora = Callable[..., int]


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernel's entry point, and the code paths that this machine can run."""

    add_lora: AddLora
    """See `loraplex_add_lora` in native/add_lora.cpp."""
    instruction_sets: Mapping[str, int]
    """Number of each by name, the least demanding first."""


def load_native_library(path: Path | None = None) -> NativeLibrary:
    """Load the library, by default the installed one.

    Raises KernelUnavailable where it was not built or cannot be used.
    """
    path = path or _installed()
    try:
        library = ctypes.CDLL(str(path))
        version = library.loraplex_abi_version
        count = library.loraplex_num_instruction_sets
        name_of = library.loraplex_instruction_set
        add_lora = library.loraplex_add_lora
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"{path.name} cannot be loaded: {error}") from error
    if version() != ABI_VERSION:
        raise KernelUnavailable(
            f"{path.name} was built from other sources; build it again with `pip install -e .`"
        )
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int64]
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    add_lora.restype = number
    add_lora.argtypes = [
        number, pointer, number, pointer, number, pointer, pointer, number,
    ]  # fmt: skip
    names = [name_of(index) for index in range(count())]
    return NativeLibrary(
        add_lora=add_lora,
        instruction_sets={name.decode(): index for index, name in enumerate(names) if name},
    )


def _installed() -> Path:
    assert torch.__version__  # loaded before the kernel
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise KernelUnavailable("it was not built: no C++ compiler was found at install")
    return Path(spec.origin)
