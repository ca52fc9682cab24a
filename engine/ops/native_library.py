"""Loads the compiled operations of native/cpu_ops.cpp, and declares their arguments."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_kernels.errors import KernelUnavailable
from lora_kernels.native_library import load_shared_library

MODULE = "engine._native"
ABI_VERSION = 1
"""Changes with the layouts and signatures in native/cpu_ops.cpp, and there."""

_N, _P, _D = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_SIGNATURES = {
    "norm": [_N, _N, _N, _N, _N, _N, _P, _N, _P, _P, _N, _D, _P, _N],
    "activate": [_N, _N, _N, _N, _N, _P, _N, _P],
    "rotate": [_N, _N, _N, _N, _N, _N, _N, _P, _N, _P, _P, _P],
    "argmax": [_N, _N, _N, _N, _N, _P, _N, _P],
    "draw": [_N, _N, _N, _N, _N, _P, _N, _P, _P, _P, _P, _P, _P],
    "store_kv": [_N, _N, _N, _N, _N, _P, _N, _P, _N, _P, _P, _P, _N],
    "attend": [_N, _N, _N, _N, _P, _P, _P, _N, _N, _N, _N, _N, _D, _D, _P, _N, _P, _P, _N, _P],
    "linear": [_N, _N, _P, _N, _N, _P, _P, _N, _P],
    "gather_rows": [_N, _P, _N, _P, _P],
}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The entry points, which native/cpu_ops.cpp documents."""

    norm: Callable[..., None]
    activate: Callable[..., None]
    rotate: Callable[..., None]
    argmax: Callable[..., None]
    draw: Callable[..., None]
    store_kv: Callable[..., None]
    attend: Callable[..., None]
    linear: Callable[..., None]
    gather_rows: Callable[..., None]
    instruction_sets: Mapping[str, int]
    """Number of each that this machine can run, by name, the least demanding first."""


def load_native_library(path: Path | None = None) -> NativeLibrary:
    """Load the library, by default the installed one.

    Raises KernelUnavailable where it was not built or cannot be used.
    """
    library = load_shared_library(MODULE, ABI_VERSION, path)
    functions: dict[str, Callable[..., None]] = {}
    for name, arguments in _SIGNATURES.items():
        try:
            function = getattr(library.functions, f"loraplex_{name}")
        except AttributeError as error:
            raise KernelUnavailable(f"{MODULE} has no {name}") from error
        function.restype, function.argtypes = None, arguments
        functions[name] = function
    return NativeLibrary(**functions, instruction_sets=library.instruction_sets)
