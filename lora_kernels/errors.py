"""Exceptions of the kernels and of the device memory for adapters.

LoraKernelError
├── KernelUnavailable    the compiled CPU kernel was not built, or cannot run here
└── PoolExhausted        an adapter's rank rows do not fit; nothing was changed
"""


class LoraKernelError(Exception):
    """Base of this package's errors; operands that do not fit are a ValueError."""


class KernelUnavailable(LoraKernelError):
    """The compiled CPU kernel cannot be used; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no compiled CPU kernel: {reason}")


class PoolExhausted(LoraKernelError):
    """A pool has fewer free rank rows than an adapter needs."""

    def __init__(self, row_size: int, wanted_rows: int, free_rows: int) -> None:
        super().__init__(
            f"{wanted_rows} rank rows of {row_size} are wanted, {free_rows} are free in the pool"
        )
        self.row_size = row_size
        self.wanted_rows = wanted_rows
        self.free_rows = free_rows
