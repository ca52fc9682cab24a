"""One place where all graphs of a device leave their results."""

import torch
from torch import Tensor


class SharedOutput:
    """Memory as large as the largest result so far.

    What a graph gives out is memory that the next one cannot have. So each copies its result here,
    where it holds until the next graph runs. Best the largest comes first: those that have a place
    keep it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def place_for(self, result: Tensor) -> Tensor:
        """A tensor of the shape and dtype of `result`, on its device, with any values."""
        if self._memory is None or self._memory.numel() < result.nbytes:
            # No tensor of inference mode: those could not be written outside of it.
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(result.nbytes, dtype=torch.uint8, device=result.device)
        return self._memory[: result.nbytes].view(result.dtype).view(result.shape)
