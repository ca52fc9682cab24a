"""A CUDA device: the only module that uses CUDA's streams, events and graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.device import Mark, Replay
from engine.device.memory_plan import DeviceFacts
from engine.device.shared_output import SharedOutput
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

_WARM_UPS = 2
"""Runs before a capture: in the first, Triton compiles and libraries take their workspaces."""


class CudaMark:
    """A `Mark`."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        """See `Mark.is_done`."""
        return self.event.query()

    def wait(self) -> None:
        """See `Mark.wait`; the host sleeps meanwhile, so that other threads run."""
        self.event.synchronize()


class CudaReplay:
    """A captured CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self._output = output

    def run(self) -> Tensor:
        """See `Replay.run`."""
        self._graph.replay()
        return self._output


class CudaDevice:
    """A `Device`: steps run on the main stream, transfers of adapters on the side stream."""

    def __init__(self, index: int = 0) -> None:
        """Raises ConfigError where there is no such device."""
        if not torch.cuda.is_available():
            raise ConfigError("device: PyTorch finds no CUDA device on this machine")
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device: cuda:{index} of {torch.cuda.device_count()} devices")
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self._side = torch.cuda.Stream(self.torch_device)
        self._capturing = torch.cuda.Stream(self.torch_device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._output = SharedOutput()

    def put(self, target: Tensor, values: npt.NDArray[Any]) -> None:
        """See `Device.put`."""
        # A new pinned block each time: PyTorch caches them and reuses none before its copy is over.
        target.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def send(self, values: npt.NDArray[Any]) -> Tensor:
        """See `Device.send`."""
        return torch.from_numpy(values).pin_memory().to(self.torch_device, non_blocking=True)

    def fetch(self, values: Tensor) -> tuple[Tensor, Mark]:
        """See `Device.fetch`."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host, self.mark()

    def pin(self, values: Tensor) -> Tensor:
        """See `Device.pin`."""
        return values.contiguous().pin_memory()

    def mark(self) -> Mark:
        """See `Device.mark`."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return CudaMark(event)

    def aside(self, after: Mark) -> AbstractContextManager[object]:
        """See `Device.aside`."""
        return self._aside(after)

    @contextmanager
    def _aside(self, after: Mark) -> "Generator[None]":
        assert isinstance(after, CudaMark)
        torch.cuda.set_device(self.torch_device)  # a thread of its own begins on device 0
        with torch.cuda.stream(self._side):
            self._side.wait_event(after.event)
            yield

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """See `Device.capture`. Graphs share their memory and the place of their results."""
        main = torch.cuda.current_stream(self.torch_device)
        self._capturing.wait_stream(main)
        with torch.cuda.stream(self._capturing):
            for _ in range(_WARM_UPS - 1):
                function()
            output = self._output.place_for(function())
        main.wait_stream(self._capturing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capturing):
            output.copy_(function())
        return CudaReplay(graph, output)

    def facts(self) -> DeviceFacts:
        """See `Device.facts`."""
        torch.cuda.empty_cache()  # memory that PyTorch only caches counts as free
        free, total = torch.cuda.mem_get_info(self.torch_device)
        own = torch.cuda.memory_reserved(self.torch_device)
        return DeviceFacts(torch.cuda.get_device_name(self.torch_device), total, free, own)

    def peak_of(self, function: Callable[[], object]) -> int:
        """See `Device.peak_of`."""
        function()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        function()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_allocated(self.torch_device) - before
