"""Finds and loads compiled kernels, which are built at install where there is a C++ compiler."""

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# PyTorch brings the OpenMP library whose symbols the kernels take, and whose threads they share.
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


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """A compiled module whose sources include native/instruction_sets.h."""

    functions: ctypes.CDLL
    instruction_sets: Mapping[str, int]
    """See `NativeLibrary.instruction_sets`."""


def load_shared_library(module: str, abi_version: int, path: Path | None = None) -> SharedLibrary:
    """Load a module of this package or of another, by default the installed one.

    Raises KernelUnavailable where it was not built, or from other sources than these.
    """
    path = path or _installed(module)
    try:
        library = ctypes.CDLL(str(path))
        version = library.loraplex_abi_version
        count = library.loraplex_num_instruction_sets
        name_of = library.loraplex_instruction_set
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"{path.name} cannot be loaded: {error}") from error
    if version() != abi_version:
        raise KernelUnavailable(
            f"{path.name} was built from other sources; build it again with `pip install -e .`"
        )
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int64]
    names = [name_of(index) for index in range(count())]
    return SharedLibrary(
        library, {name.decode(): index for index, name in enumerate(names) if name}
    )


def load_native_library(path: Path | None = None) -> NativeLibrary:
    """Load the kernel of `add_lora`, by default the installed one.

    Raises KernelUnavailable where it was not built or cannot be used.
    """
    library = load_shared_library(MODULE, ABI_VERSION, path)
    try:
        add_lora = library.functions.loraplex_add_lora
    except AttributeError as error:
        raise KernelUnavailable(f"{MODULE} has no add_lora") from error
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    add_lora.restype = number
    add_lora.argtypes = [
        number, pointer, number, pointer, number, pointer, pointer, number,
    ]  # fmt: skip
    return NativeLibrary(add_lora=add_lora, instruction_sets=library.instruction_sets)


def _installed(module: str) -> Path:
    assert torch.__version__  # loaded before the kernels
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise KernelUnavailable("it was not built: no C++ compiler was found at install")
    return Path(spec.origin)
