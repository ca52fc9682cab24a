"""The choice between PyTorch's operators and the compiled kernels of CPUs."""

from engine.ops.native_library import load_native_library
from engine.ops.protocol import DecoderOps
from engine.ops.torch_ops import TorchOps
from lora_kernels.errors import KernelUnavailable


def choose_ops(choice: str = "auto") -> DecoderOps:
    """Pick by the same names as `lora_kernels.choose_cpu_kernels`.

    They are `torch`, `native`, `native/<instruction set>` and `auto`: the best compiled ones, else
    `torch`. Raises KernelUnavailable if the path that was asked for by name cannot run on this
    machine, ValueError for an unknown name.
    """
    family, _, instruction_set = choice.partition("/")
    if choice == "torch":
        return TorchOps()
    if family != "native" and choice != "auto":
        raise ValueError(f"no CPU path is called {choice!r}: it is auto, native or torch")
    try:
        library = load_native_library()
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
