"""A device as the runner sees it: asynchronous copies, marks, captured work and memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from engine.device.memory_plan import DeviceFacts
from engine.device.shared_output import SharedOutput


class Mark(Protocol):
    """A point in the work that was queued on a stream."""

    def is_done(self) -> bool:
        """Whether everything that was queued before it is done; never waits."""
        ...

    def wait(self) -> None:
        """Block the host until it is done."""
        ...


class Replay(Protocol):
    """Work that was captured once and can be queued again, on the same tensors."""

    def run(self) -> Tensor:
        """Queue it again; returns the captured function's tensor, valid until the next replay."""
        ...


class Device(Protocol):
    """One device with a main stream and a side stream; a CPU does everything at once."""

    torch_device: torch.device

    def put(self, target: Tensor, values: npt.NDArray[Any]) -> None:
        """Queue a copy into a tensor of the same shape; `values` may change after the call."""
        ...

    def send(self, values: npt.NDArray[Any]) -> Tensor:
        """Queue a copy to a new tensor on the device; `values` may change after the call."""
        ...

    def fetch(self, values: Tensor) -> tuple[Tensor, Mark]:
        """Queue a copy to pinned host memory; valid once the mark is done."""
        ...

    def pin(self, values: Tensor) -> Tensor:
        """The same values in pinned host memory, from which copies to the device do not block."""
        ...

    def mark(self) -> Mark:
        """A mark after everything that was queued on the current stream so far."""
        ...

    def aside(self, after: Mark) -> AbstractContextManager[object]:
        """Queue what happens inside on the side stream, to begin once the mark is done."""
        ...

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """Capture what the function queues, after a warm-up; its tensors keep their addresses."""
        ...

    def facts(self) -> DeviceFacts:
        """How much memory there is at this moment."""
        ...

    def peak_of(self, function: Callable[[], object]) -> int:
        """Peak bytes that a call takes, beyond what was held before it.

        The function is called twice: the first call makes what is only made once.
        """
        ...


class HostMark:
    """A `Mark` of work that is done already."""

    def is_done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class CallReplay:
    """A `Replay` that calls the function again."""

    def __init__(self, function: Callable[[], Tensor], output: SharedOutput) -> None:
        self._function = function
        self._output = output

    def run(self) -> Tensor:
        """See `Replay.run`."""
        result = self._function()
        return self._output.place_for(result).copy_(result)


class HostDevice:
    """The CPU as a `Device`: the code paths of a GPU, with nothing queued and nothing pinned."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._output = SharedOutput()

    def put(self, target: Tensor, values: npt.NDArray[Any]) -> None:
        """See `Device.put`."""
        target.copy_(torch.from_numpy(values))

    def send(self, values: npt.NDArray[Any]) -> Tensor:
        """See `Device.send`."""
        return torch.from_numpy(values).clone()

    def fetch(self, values: Tensor) -> tuple[Tensor, Mark]:
        """See `Device.fetch`."""
        return values.clone(), HostMark()

    def pin(self, values: Tensor) -> Tensor:
        """See `Device.pin`."""
        return values.contiguous()

    def mark(self) -> Mark:
        """See `Device.mark`."""
        return HostMark()

    def aside(self, after: Mark) -> AbstractContextManager[object]:
        """See `Device.aside`."""
        return nullcontext()

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """See `Device.capture`; a replay calls the function, and copies its result as graphs do."""
        return CallReplay(function, self._output)

    def facts(self) -> DeviceFacts:
        """See `Device.facts`."""
        memory = psutil.virtual_memory()
        own = psutil.Process().memory_info().rss
        return DeviceFacts("cpu", memory.total, memory.available, own)

    def peak_of(self, function: Callable[[], object]) -> int:
        """See `Device.peak_of`; always 0: on a CPU nothing is planned by it."""
        return 0
