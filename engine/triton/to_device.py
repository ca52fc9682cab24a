"""Asynchronous copies to and from the host."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(host: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Queue a copy on the current stream; the array must not change afterwards."""
    tensor = torch.from_numpy(host)
    if device.type == "cuda":
        # A new pinned block each time, because the last copy may still be under way. PyTorch caches
        # them.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class FetchedTensor:
    """A copy to the host that was queued on the current stream."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = values.clone()

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
