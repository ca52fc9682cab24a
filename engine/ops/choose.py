"""The choice between PyTorch's operators, the compiled kernels of CPUs, and Triton's on GPUs."""

import torch

from engine.ops.native_library import NativeLibrary, load_native_library
from engine.ops.protocol import DecoderOps
from engine.ops.torch_ops import TorchOps
from lora_kernels.errors import KernelUnavailable


def choose_ops(choice: str = "auto", *, library: NativeLibrary | None = None) -> DecoderOps:
    """Pick by the same names as `lora_kernels.choose_cpu_kernels`.

    They are `torch`, `native`, `native/<instruction set>` and `auto`: the best compiled ones, else
    `torch`. `library` is the installed one by default. Raises KernelUnavailable if the path that
    was asked for by name cannot run on this machine, ValueError for an unknown name.
    """
    family, _, instruction_set = choice.partition("/")
    if choice == "torch":
        return TorchOps()
    if family != "native" and choice != "auto":
        raise ValueError(f"no CPU path is called {choice!r}: it is auto, native or torch")
    try:
        library = library or load_native_library()
    except KernelUnavailable as error:
        if choice == "auto":
            return TorchOps(str(error))
        raise
    # Late: it needs structlog, and a GPU's path, which chooses no CPU kernels, does not.
    from engine.ops.native_ops import NativeOps

    name = instruction_set or list(library.instruction_sets)[-1]
    if name not in library.instruction_sets:
        raise KernelUnavailable(
            f"it has no code for {name!r} that this machine can run; "
            f"it has {', '.join(library.instruction_sets)}"
        )
    return NativeOps(library, name)


def choose_device_ops(
    device: torch.device | str,
    choice: str = "auto",
    *,
    max_positions: int,
    batch_invariant: bool = False,
    architecture: int | None = None,
) -> DecoderOps:
    """Pick for tensors on a GPU, or for the CPU's in Triton's interpreter.

    `choice` is `torch`, `triton` or `auto`: `triton` if it is installed, else `torch`. The other
    arguments are those of `engine.triton.ops.TritonOps`. Raises KernelUnavailable if `triton` was
    asked for by name and is not installed, ValueError for an unknown name.
    """
    if choice == "torch":
        return TorchOps()
    if choice not in ("auto", "triton"):
        raise ValueError(f"no path on {device} is called {choice!r}: it is auto, triton or torch")
    try:
        # Late: the CPU's path never loads Triton, which some platforms do not have.
        from engine.triton.ops import TritonOps
    except ImportError as error:
        if choice == "auto":
            return TorchOps(f"Triton cannot be loaded: {error}")
        raise KernelUnavailable(f"Triton cannot be loaded: {error}") from error
    return TritonOps(
        device,
        max_positions=max_positions,
        batch_invariant=batch_invariant,
        architecture=architecture,
    )
