"""One place where all graphs of a device leave their results."""

import torch
from torch import Tensor


class SharedOutput:
    """Memory as large as the largest result so far.

    If every graph returned a tensor of its own, graphs could not share that memory. So each copies
    its result here, where it is valid until the next graph runs. Capture the largest first: graphs
    that were captured keep the memory they were given, even if a larger one replaces it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def place_for(self, result: Tensor) -> Tensor:
        """A tensor of the shape and dtype of `result`, on its device, with any values."""
        if self._memory is None or self._memory.numel() < result.nbytes:
            # Made outside of inference mode, or it could not be written outside of it either.
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(result.nbytes, dtype=torch.uint8, device=result.device)
        return self._memory[: result.nbytes].view(result.dtype).view(result.shape)
