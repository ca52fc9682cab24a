"""One launch of a Triton kernel, to be run, or compiled by the ahead-of-time report."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton import knobs


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch; the ahead-of-time report compiles the same objects that the engine runs."""

    kernel: Any
    """A `triton.jit` function."""
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, int | bool]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Queue the kernel on the current stream."""
        self.kernel[self.grid](
            **self.arguments,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=True,
        )


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU and in NumPy."""
    return bool(knobs.runtime.interpret)
