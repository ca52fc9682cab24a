"""What `CudaDevice` captures, on streams and graphs that are acted out on the CPU.

A graph is the list of operations that were queued, run again on the same tensors. It is stricter
than CUDA: what a capture computes, and whatever lies in the graphs' pool before a replay, is NaN.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.cuda_device import CudaDevice
from engine.device.shared_output import SharedOutput

POOL = "the pool"


class ActedStream:
    def __init__(self, cuda: "ActedCuda", name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: "ActedStream") -> None:
        self._cuda.events.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "ActedEvent") -> None:
        self._cuda.events.append(f"{self.name} waits for the mark on {event.stream}")


class ActedEvent:
    def __init__(self, cuda: "ActedCuda") -> None:
        self._cuda = cuda
        self.stream = ""

    def record(self, stream: ActedStream) -> None:
        self.stream = stream.name
        self._cuda.events.append(f"mark on {stream.name}")


class ActedGraph:
    def __init__(self, cuda: "ActedCuda") -> None:
        self._cuda = cuda
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]] = []
        self.memory: list[Tensor] = []
        """What was allocated in the capture: the pool's."""

    def replay(self) -> None:
        for graph in self._cuda.graphs:
            for values in graph.memory:
                values.fill_(float("nan"))
        for function, arguments, options, result in self.calls:
            again = function(*arguments, **options)
            if again.data_ptr() != result.data_ptr():
                result.copy_(again)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: ActedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, result))
        known = {part.untyped_storage().data_ptr() for part in args if isinstance(part, Tensor)}
        if result.untyped_storage().data_ptr() not in known:
            self._graph.memory.append(result)
        return result


class ActedCuda:
    """Stands in for `torch.cuda`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.graphs: list[ActedGraph] = []
        self._made = iter(["side", "capturing"])
        self.current = ActedStream(self, "main")

    def stream_of(self, device: torch.device) -> ActedStream:
        return ActedStream(self, next(self._made))

    @contextmanager
    def stream(self, stream: ActedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: ActedGraph, *, pool: str, stream: ActedStream) -> Iterator[None]:
        assert pool == POOL
        self.graphs.append(graph)
        self.events.append(f"capture on {stream.name}")
        with self.stream(stream), Recorder(graph):
            yield
        for *_, result in graph.calls:  # a capture computes nothing
            result.fill_(float("nan"))


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, ActedCuda]:
    cuda = ActedCuda()
    for name, stand_in in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda index: cuda.events.append(f"{threading.get_ident()} on {index}"),
        "Stream": cuda.stream_of,
        "Event": lambda blocking: ActedEvent(cuda),
        "stream": cuda.stream,
        "current_stream": lambda device: cuda.current,
        "graph_pool_handle": lambda: POOL,
        "CUDAGraph": lambda: ActedGraph(cuda),
        "graph": cuda.graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = CudaDevice()
    cuda.events.clear()
    return device, cuda


def doubled(inputs: Tensor, calls: list[str], cuda: ActedCuda) -> Callable[[], Tensor]:
    def function() -> Tensor:
        calls.append(cuda.current.name)
        return (inputs + inputs).clone()

    return function


def test_a_capture_follows_warm_ups_on_its_own_stream_and_a_replay_calls_nothing(acted):
    device, cuda = acted
    inputs, calls = torch.tensor([1.0, 2.0]), list[str]()
    replay = device.capture(doubled(inputs, calls, cuda))
    assert calls == ["capturing"] * 3, "two warm-ups, and the capture"
    assert cuda.events == [
        "capturing waits for main", "main waits for capturing", "capture on capturing"
    ]  # fmt: skip
    for value in (3.0, 5.0):
        inputs.fill_(value)
        assert replay.run().tolist() == [2 * value] * 2, "of what lies in the inputs by now"
    assert len(calls) == 3


def test_what_is_put_aside_begins_behind_its_mark_on_the_device_of_the_engine(acted):
    """A thread begins on device 0, whichever is the engine's."""
    device, cuda = acted
    after = device.mark()

    def put_aside() -> int:
        with device.aside(after):
            device.mark()
        device.mark()
        return threading.get_ident()

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(put_aside).result()
    assert other != threading.get_ident()
    assert cuda.events == [
        "mark on main", f"{other} on cuda:0", "side waits for the mark on main", "mark on side",
        "mark on main",
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(6, 3, 1), (1, 3, 6)])
def test_graphs_of_all_sizes_leave_right_results_outside_of_their_pool(acted, sizes):
    device, cuda = acted
    inputs = {size: torch.zeros(size, 5) for size in sizes}
    replays = {size: device.capture(doubled(values, [], cuda)) for size, values in inputs.items()}
    for number, size in enumerate((3, 6, 1, 6, 3), start=1):
        inputs[size].fill_(number)
        result = replays[size].run()
        assert torch.equal(result, torch.full((size, 5), 2.0 * number))
        pooled = {part.data_ptr() for graph in cuda.graphs for part in graph.memory}
        assert pooled and result.data_ptr() not in pooled


def test_with_the_largest_first_all_results_share_one_place(acted):
    device, cuda = acted
    places = [
        device.capture(doubled(torch.zeros(size, 5), [], cuda)).run().data_ptr()
        for size in (6, 3, 1)
    ]
    assert len(set(places)) == 1


def test_a_place_can_be_written_in_and_out_of_inference_mode_and_has_the_results_dtype():
    shared = SharedOutput()
    with torch.inference_mode():
        first = shared.place_for(torch.zeros(4, 3, dtype=torch.bfloat16))
        first.fill_(1.0)
    assert (first.dtype, first.shape) == (torch.bfloat16, (4, 3))
    second = shared.place_for(torch.zeros(2, 3))
    second.fill_(2.0)
    assert second.dtype is torch.float32 and second.data_ptr() == first.data_ptr()
    assert shared.place_for(torch.zeros(9, 3)).data_ptr() != first.data_ptr()
    assert second.tolist() == [[2.0] * 3] * 2, "who has a place keeps it"
