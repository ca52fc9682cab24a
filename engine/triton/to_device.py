"""Copies from the host that the step does not wait for."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(host: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Queue a copy on the current stream; the array must not change afterwards."""
    tensor = torch.from_numpy(host)
    if device.type == "cuda":
        # A new pinned block each time, which PyTorch keeps for the next: the last copy may still
        # be on its way.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
