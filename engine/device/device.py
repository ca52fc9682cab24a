"""A device as the runner sees it: copies that nothing waits for, marks, captured work, memory."""

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
        """Whether all that was queued before it is over; never waits."""
        ...

    def wait(self) -> None:
        """Let the host wait for it."""
        ...


class Replay(Protocol):
    """Work that was captured once and can be queued again, on the same tensors."""

    def run(self) -> Tensor:
        """Queue it; returns the captured function's tensor, holding new values until the next."""
        ...


class Device(Protocol):
    """One device with its main stream and a side stream; on a CPU all is done when it is asked."""

    torch_device: torch.device

    def put(self, target: Tensor, values: npt.NDArray[Any]) -> None:
        """Queue a copy from the host into a tensor of the same shape; `values` may change after."""
        ...

    def send(self, values: npt.NDArray[Any]) -> Tensor:
        """Queue a copy from the host to a new tensor; `values` may change after."""
        ...

    def fetch(self, values: Tensor) -> tuple[Tensor, Mark]:
        """Queue a copy to pinned host memory; it is there once the mark is done."""
        ...

    def pin(self, values: Tensor) -> Tensor:
        """The same in pinned host memory, from where copies to the device wait for nothing."""
        ...

    def mark(self) -> Mark:
        """A mark after all that was queued on the current stream."""
        ...

    def aside(self, after: Mark) -> AbstractContextManager[object]:
        """What is queued inside goes to the side stream, and begins once the mark is done."""
        ...

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """Capture what the function queues, after a warm-up; all its tensors keep their place."""
        ...

    def facts(self) -> DeviceFacts:
        """Memory at this moment."""
        ...

    def peak_of(self, function: Callable[[], object]) -> int:
        """Bytes that a call takes at its worst, beyond what is held before it.

        It is called twice: the first time brings what is only made once.
        """
        ...


class HostMark:
    """A `Mark` of work that is over."""

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
    """The CPU as a `Device`: the same paths as on a GPU, with nothing queued and nothing pinned."""

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
        """See `Device.capture`; a replay is a call, whose result goes where a graph's would."""
        return CallReplay(function, self._output)

    def facts(self) -> DeviceFacts:
        """See `Device.facts`."""
        memory = psutil.virtual_memory()
        own = psutil.Process().memory_info().rss
        return DeviceFacts("cpu", memory.total, memory.available, own)

    def peak_of(self, function: Callable[[], object]) -> int:
        """See `Device.peak_of`; a CPU has room to spare, and nothing is called."""
        return 0
