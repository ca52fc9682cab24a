"""Time to first token through the service and of the engine alone, in calls that take turns."""

import socket
import statistics
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import zmq

from benchmarks.paced_service import ADAPTER, PacedService
from benchmarks.raw_streams import Call, Stream, chat, completion, connect, read_all
from engine.messages import EngineRequest, Generate, Hello, Outputs, Welcome
from engine.sampling_params import SamplingParams
from engine.wire import Codec

Times = dict[str, list[float]]
"""Milliseconds by the way a call went."""
ALONE = "engine alone"
BASE = "completions"
CACHED = "completions, cached adapter"


class DirectCalls:
    """Calls of the engine over its socket, without the service."""

    def __init__(self, service: PacedService, prompt: list[int]) -> None:
        self._prompt = prompt
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{service.engine_socket}")
        self._codec = Codec()
        self._next_id = 0

    def first_token(self) -> float:
        session = self._join()
        self._next_id += 1
        request = EngineRequest(
            request_id=self._next_id, tenant="acme", prompt_token_ids=self._prompt,
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
        )  # fmt: skip
        started = time.perf_counter()
        self._socket.send(self._codec.encode(Generate(request, session=session)))
        while not isinstance(self._codec.decode_engine(self._socket.recv()), Outputs):
            pass
        return time.perf_counter() - started

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _join(self) -> int:
        """Each time: the engine drops a client that was silent between two calls."""
        self._socket.send(self._codec.encode(Hello()))
        while True:
            message = self._codec.decode_engine(self._socket.recv())
            if isinstance(message, Welcome):
                return message.session


def measure_first_tokens(service: PacedService, rounds: int) -> Times:
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
    times: Times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
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


def print_first_tokens(name: str, times: Times) -> None:
    print(f"\nTime to first token, ms, {name}\n  {'':32}{'p50':>10}{'p99':>10}{'added p50':>12}")
    alone = statistics.median(times[ALONE])
    for way, found in times.items():
        p50, p99 = statistics.median(found), sorted(found)[int(0.99 * len(found))]
        print(f"  {way:32}{p50:10.2f}{p99:10.2f}{p50 - alone:12.2f}")
    pairs = zip(times[CACHED], times[BASE], strict=True)
    print(f"  a cached adapter adds {statistics.median(a - b for a, b in pairs):.2f} (bar: 1.00)")
