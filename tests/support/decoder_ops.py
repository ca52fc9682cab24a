"""All implementations of a decoder's operations that this machine can run."""

from engine.ops import DecoderOps, choose_ops
from engine.ops.native_library import load_native_library
from lora_kernels.errors import KernelUnavailable


def ops_names() -> list[str]:
    """Names for `choose_ops`; without a C++ compiler at install only PyTorch's."""
    try:
        library = load_native_library()
    except KernelUnavailable:
        return ["torch"]
    return ["torch", *(f"native/{name}" for name in library.instruction_sets)]


def make_ops(name: str) -> DecoderOps:
    return choose_ops(name)
