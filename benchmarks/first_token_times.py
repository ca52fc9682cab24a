"""Time to first token through the service and of the engine alone, in calls that take turns."""

import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import zmq

from benchmarks.paced_service import ADAPTER, PacedService
from benchmarks.raw_streams import Call, Stream, chat, completion, connect, read_all
from benchmarks.serving.figures import percentile
from engine.messages import EngineMessage, EngineRequest, Generate, Hello, Outputs, Welcome
from engine.sampling_params import SamplingParams
from engine.transport.wire import Codec

M = TypeVar("M", bound=EngineMessage)
Times = dict[str, list[float]]
"""Milliseconds by the way a call went."""
ALONE = "engine alone"
BASE = "completions"
CACHED = "completions, cached adapter"


class DirectCalls:
    """Calls of the engine over its socket, without the service; one at least every 2 seconds."""

    def __init__(self, service: PacedService, prompt: list[int]) -> None:
        self._prompt = prompt
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.RCVTIMEO, 10_000)
        self._socket.connect(f"ipc://{service.engine_socket}")
        self._codec = Codec()
        self._next_id = 0
        self._socket.send(self._codec.encode(Hello()))
        self._session = self._receive(Welcome).session

    def first_token(self) -> float:
        self._next_id += 1
        request = EngineRequest(
            request_id=self._next_id, tenant="acme", prompt_token_ids=self._prompt,
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
        )  # fmt: skip
        started = time.perf_counter()
        self._socket.send(self._codec.encode(Generate(request, session=self._session)))
        self._receive(Outputs)
        return time.perf_counter() - started

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _receive(self, kind: type[M]) -> M:
        while True:
            message = self._codec.decode_engine(self._socket.recv())
            if isinstance(message, kind):
                return message


def measure_first_tokens(service: PacedService, rounds: int, step_seconds: float = 0.0) -> Times:
    """Calls come at any moment of a step, since they wait for the next one."""
    call = completion("base", 1)
    direct = DirectCalls(service, call.body["prompt"])
    ways: dict[str, Callable[[], float]] = {
        ALONE: direct.first_token,
        BASE: _calls(service, call),
        CACHED: _calls(service, completion(ADAPTER.name, 1)),
        "chat": _calls(service, chat("base", 1)),
    }
    for way in ways.values():  # connections, caches, the adapter's load
        way()
    moments = random.Random(1)
    times: Times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            time.sleep(moments.uniform(0, step_seconds))
            times[name].append(1e3 * way())
    direct.close()
    return times


def _calls(service: PacedService, call: Call) -> Callable[[], float]:
    request = call.as_bytes(service.key)
    [stream] = connect(service.port, 1)

    def first_token() -> float:
        stream.send(request)
        read_all([stream])
        return stream.first_at - stream.sent_at

    return first_token


@contextmanager
def running_streams(service: PacedService, num: int, num_tokens: int) -> Generator[None]:
    """Other streams meanwhile, each followed by the next."""
    request = completion("base", num_tokens).as_bytes(service.key)

    def go_on(stream: Stream) -> bool:
        stream.send(request)
        return True

    streams = connect(service.port, num)
    for stream in streams:
        stream.send(request)
    reader = threading.Thread(target=read_all, args=(streams, go_on))
    reader.start()
    try:
        yield
    finally:
        for stream in streams:
            stream.connection.shutdown(socket.SHUT_RDWR)
        reader.join()  # by the SystemExit of a stream that was cut


def first_token_cells(name: str, times: Times) -> list[list[str]]:
    """A row for each way; the last one is what a cached adapter adds, pair by pair."""
    alone = statistics.median(times[ALONE])
    rows = [
        [
            f"{way}, {name}",
            f"{statistics.median(found):.2f}",
            f"{percentile(found, 0.99):.2f}",
            f"{statistics.median(found) - alone:.2f}",
        ]
        for way, found in times.items()
    ]
    pairs = zip(times[CACHED], times[BASE], strict=True)
    added = statistics.median(cached - base for cached, base in pairs)
    return [*rows, [f"a cached adapter, {name}", "", "", f"{added:.2f}"]]
