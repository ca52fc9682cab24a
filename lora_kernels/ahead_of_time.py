"""Compiles a launch for a GPU that is not here, and says what it costs there.

The kernel gets the types and divisors that the JIT would find at the launch.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_kernels.kernel_call import KernelCall
from lora_kernels.ptx_access import Access, read_accesses

POINTERS: Mapping[torch.dtype, str] = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What a compiled launch uses."""

    registers: int
    """A thread."""
    spill_bytes: int
    """A thread; its stack, where nothing else lies."""
    shared_bytes: int
    """A block."""
    accesses: tuple[Access, ...]
    """To tiles in global memory."""

    @property
    def widths(self) -> dict[str, tuple[int, ...]]:
        """Bytes of the accesses, by array, without repeats."""
        names = sorted({access.name for access in self.accesses})
        return {
            name: tuple(sorted({a.num_bytes for a in self.accesses if a.name == name}))
            for name in names
        }


def compile_call(call: KernelCall, architecture: int) -> MachineCode:
    """Compile a launch for a compute capability x 10; about a second."""
    compiled = triton.compile(
        _source(call),
        target=GPUTarget("cuda", architecture, 32),
        options={
            "num_warps": call.num_warps,
            "num_stages": call.num_stages,
            "enable_fp_fusion": True,
        },
    )
    registers, stack = _resource_usage(compiled.asm["cubin"])
    return MachineCode(
        registers=registers,
        spill_bytes=stack,
        shared_bytes=int(compiled.metadata.shared),
        accesses=tuple(read_accesses(compiled.asm["ptx"])),
    )


def _source(call: KernelCall) -> ASTSource:
    signature: dict[str, str] = {}
    attrs: dict[tuple[int], list[list[object]]] = {}
    for index, parameter in enumerate(call.kernel.params):
        name = parameter.name
        value = call.arguments.get(name)
        if value is None:
            signature[name] = "constexpr"
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if value is not None and _is_aligned(value) and not parameter.do_not_specialize:
            # Without it the kernel would be compiled for any address: 2-byte loads, and spills.
            attrs[index,] = [["tt.divisibility", 16]]
    return ASTSource(call.kernel, signature, dict(call.constants), attrs)


def _is_aligned(value: Tensor | int | float) -> bool:
    # A CPU tensor need not start on 16 bytes where a CUDA tensor's block always does.
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of its stack, where spills go."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump said: {text}")
    return int(found[1]), int(found[2])
