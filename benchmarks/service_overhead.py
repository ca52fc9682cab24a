"""What the service adds to the engine: tokens a second through one API process, CPU time a token,
and time to first token, with an engine that computes nothing.

    python -m benchmarks.service_overhead [--model DIR] [--rounds N]

Three processes share the machine: the engine (real server, scheduler and socket, a runner that does
nothing), one API process as `loraplex serve` starts it, and this one, which counts the streams'
bytes. Flat out the engine does not wait, so that a process that is behind finds several tokens at
once and sends them in one event; at a fixed step time each token is an event of its own.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_token_times import measure_first_tokens, print_first_tokens, running_streams
from benchmarks.paced_service import ADAPTER, PacedService, paced_service
from benchmarks.raw_streams import Call, chat, completion, connect, read_all
from loraplex.weights import ensure_weights

NUM_STREAMS = 32
LOADED_STEP_SECONDS = 0.02


@dataclass(frozen=True)
class Pace:
    name: str
    step_seconds: float
    stream_tokens: int


PACES = [
    Pace("flat out", 0.0, 1900),
    Pace("20,000 tokens/s", NUM_STREAMS / 20_000, 1900),
    Pace("20 ms a step", LOADED_STEP_SECONDS, 250),
]


@dataclass(frozen=True)
class Throughput:
    tokens_per_second: float
    tokens_per_event: float
    api_us: float
    """CPU time of the API process for a token."""
    engine_us: float
    client_us: float
    p99_gap_ms: float
    """Between arrivals of bytes on one stream."""


def measure_throughput(service: PacedService, call: Call) -> Throughput:
    streams = connect(service.port, NUM_STREAMS)
    request = call.as_bytes(service.key)
    before = _cpu_seconds(service)
    for stream in streams:
        stream.send(request)
    read_all(streams)
    api, engine, client = (
        after - start for after, start in zip(_cpu_seconds(service), before, strict=True)
    )
    num_tokens = sum(stream.num_tokens for stream in streams)
    if num_tokens != NUM_STREAMS * call.body["max_tokens"]:
        raise SystemExit(f"{num_tokens} tokens came, not {NUM_STREAMS * call.body['max_tokens']}")
    seconds = max(s.last_at for s in streams) - min(s.first_at for s in streams)
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    for stream in streams:
        stream.connection.close()
    return Throughput(
        tokens_per_second=num_tokens / seconds,
        tokens_per_event=num_tokens / sum(stream.num_events for stream in streams),
        api_us=1e6 * api / num_tokens,
        engine_us=1e6 * engine / num_tokens,
        client_us=1e6 * client / num_tokens,
        p99_gap_ms=1e3 * gaps[int(0.99 * len(gaps))],
    )


def _cpu_seconds(service: PacedService) -> tuple[float, float, float]:
    api, engine = service.api.cpu_times(), service.engine.cpu_times()
    return api.user + api.system, engine.user + engine.system, time.process_time()


def print_throughput(name: str, results: Sequence[Throughput]) -> None:
    def middle(field: str) -> float:
        return statistics.median(getattr(result, field) for result in results)

    print(
        f"  {name:36}{middle('tokens_per_second'):10,.0f}{middle('tokens_per_event'):11.2f}"
        f"{middle('api_us'):8.1f}{middle('engine_us'):8.1f}{middle('client_us'):8.1f}"
        f"{middle('p99_gap_ms'):10.1f}"
    )


def measure_pace(service: PacedService, pace: Pace, rounds: int) -> None:
    calls = {
        "completions": completion("base", pace.stream_tokens),
        "completions, adapter": completion(ADAPTER.name, pace.stream_tokens),
        "chat": chat("base", pace.stream_tokens),
    }
    results: dict[str, list[Throughput]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            results[name].append(measure_throughput(service, call))
    for name, found in results.items():
        print_throughput(f"{name}, {pace.name}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of the model whose tokenizer is used")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model_dir = args.model or ensure_weights()
    print(f"{NUM_STREAMS} streams (bar: 20,000 tokens/s)")
    print(f"  {'':36}{'':10}{'':11}{'CPU µs a token':>24}{'p99 gap':>10}")
    print(
        f"  {'':36}{'tokens/s':>10}{'tok/event':>11}{'API':>8}{'engine':>8}{'client':>8}{'ms':>10}"
    )
    for pace in PACES:
        with paced_service(model_dir, pace.step_seconds) as service:
            measure_pace(service, pace, args.rounds)
    with paced_service(model_dir, 0.0) as service:
        idle = measure_first_tokens(service, 100 * args.rounds)
    print_first_tokens("one call at a time (bar: 3.00 added)", idle)
    with (
        paced_service(model_dir, LOADED_STEP_SECONDS) as service,
        running_streams(service, NUM_STREAMS - 1, PACES[0].stream_tokens),
    ):
        loaded = measure_first_tokens(service, 20 * args.rounds)
    print_first_tokens(f"beside {NUM_STREAMS - 1} streams at 20 ms a step", loaded)


if __name__ == "__main__":
    main()
