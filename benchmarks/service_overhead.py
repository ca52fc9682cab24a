"""What the service adds to the engine: tokens a second through one API process, CPU time a token,
and time to first token, with an engine that computes nothing.

    python -m benchmarks.service_overhead [--rounds N] [--model DIR] [--json FILE]

Three processes share the machine: the engine (real server, scheduler and socket, a runner that does
nothing), one API process as `loraplex serve` starts it, and this one, which counts the streams'
bytes. Flat out the engine does not wait, so that a process that is behind finds several tokens at
once and sends them in one event; at a fixed step time each token is an event of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.first_token_times import first_token_cells, measure_first_tokens, running_streams
from benchmarks.paced_service import ADAPTER, PacedService, paced_service
from benchmarks.raw_streams import Call, chat, completion, connect, read_all
from benchmarks.serving.figures import machine, markdown, over_passes, percentile, write_json
from benchmarks.serving.options import make_parser, model_dir

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
    for stream in streams:
        stream.connection.close()
    return Throughput(
        tokens_per_second=num_tokens / seconds,
        tokens_per_event=num_tokens / sum(stream.num_events for stream in streams),
        api_us=1e6 * api / num_tokens,
        engine_us=1e6 * engine / num_tokens,
        client_us=1e6 * client / num_tokens,
        p99_gap_ms=1e3 * percentile([gap for s in streams for gap in s.gaps], 0.99),
    )


def _cpu_seconds(service: PacedService) -> tuple[float, float, float]:
    api, engine = service.api.cpu_times(), service.engine.cpu_times()
    return api.user + api.system, engine.user + engine.system, time.process_time()


COLUMNS = (
    "32 streams", "tokens/s", "tokens an event", "CPU µs a token: API", "engine", "client",
    "p99 gap ms",
)  # fmt: skip
FIRST_TOKEN_COLUMNS = ("time to first token, ms", "p50", "p99", "added to p50")


def throughput_cells(name: str, results: Sequence[Throughput]) -> list[str]:
    return [
        name,
        over_passes([result.tokens_per_second for result in results]),
        over_passes([result.tokens_per_event for result in results], 2),
        over_passes([result.api_us for result in results], 1),
        over_passes([result.engine_us for result in results], 1),
        over_passes([result.client_us for result in results], 1),
        over_passes([result.p99_gap_ms for result in results], 1),
    ]


def measure_pace(service: PacedService, pace: Pace, rounds: int) -> dict[str, list[Throughput]]:
    """By what was called, in calls that take turns."""
    calls = {
        "completions": completion("base", pace.stream_tokens),
        "completions, adapter": completion(ADAPTER.name, pace.stream_tokens),
        "chat": chat("base", pace.stream_tokens),
    }
    results: dict[str, list[Throughput]] = {f"{name}, {pace.name}": [] for name in calls}
    for _ in range(rounds):
        for call, found in zip(calls.values(), results.values(), strict=True):
            found.append(measure_throughput(service, call))
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    started = time.monotonic()
    model = model_dir(options)
    print(machine(), flush=True)
    throughput: dict[str, list[Throughput]] = {}
    for pace in PACES:
        with paced_service(model, pace.step_seconds) as service:
            throughput |= measure_pace(service, pace, options.rounds)
    rows = [throughput_cells(name, results) for name, results in throughput.items()]
    print(f"\n{markdown(COLUMNS, rows)}\n\nThe bar: 20,000 tokens/s, flat out.", flush=True)
    with paced_service(model, 0.0) as service:
        idle = measure_first_tokens(service, 100 * options.rounds)
    with (
        paced_service(model, LOADED_STEP_SECONDS) as service,
        running_streams(service, NUM_STREAMS - 1, PACES[0].stream_tokens),
    ):
        loaded = measure_first_tokens(service, 50 * options.rounds, LOADED_STEP_SECONDS)
    rows = first_token_cells("one at a time", idle)
    rows += first_token_cells("beside 31 streams, 20 ms a step", loaded)
    print(
        f"\n{markdown(FIRST_TOKEN_COLUMNS, rows)}\n\nThe bars: one at a time, 3 ms "
        f"added; 1 ms by a cached adapter.\n\n{time.monotonic() - started:.0f} s; {machine()}"
    )
    write_json(
        options.json,
        {
            "machine": machine(),
            "throughput": {
                name: [asdict(result) for result in results] for name, results in throughput.items()
            },
            "first_token_ms": {"one at a time": idle, "loaded": loaded},
        },
    )


if __name__ == "__main__":
    main()
