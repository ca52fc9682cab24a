"""What it costs to be watched: `python -m benchmarks.metrics_cost [--pairs N] [--json FILE]`.

A real `loraplex serve` with 8 adapter slots gets the workload `mix8` again and again; in every
second pass three dashboards are open and a Prometheus scrapes every 5 s. Passes are compared in
interleaved pairs by the CPU seconds of all of the service's processes for an output token. The
recorder of the engine cannot be taken out of a service, so what it adds is measured beside it, on
the step loop without a model, and is part of both. The whole has to stay below 2%.
"""

import statistics
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.recording import recording_seconds_per_token
from benchmarks.serving.figures import machine, markdown, write_json
from benchmarks.serving.intervals import Interval, added, interval
from benchmarks.serving.load import warm_up
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import OurService, our_service
from benchmarks.serving.passes import cpu_seconds_per_token
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from benchmarks.watchers import Seen, watching

BAR = 0.02
MIX = "mix8"
SLOTS = 8


def watched_seconds_per_token(service: OurService, loops: int) -> tuple[float, Seen]:
    """The same, watched."""
    with watching(service.service.url, service.service.admin_key) as seen:
        taken = cpu_seconds_per_token(service, MIX, loops)
    if seen.errors or not seen.events or not seen.pages:
        raise RuntimeError(f"the watchers did not see what they should: {seen}")
    return taken, seen


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--loops", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    model = model_dir(options)
    print(machine(), flush=True)
    quiet: list[float] = []
    watched: list[float] = []
    seen = Seen()
    with TemporaryDirectory(prefix="loraplex-bench-") as folder:
        adapters = write_adapters(model, Path(folder), adapter_names(SLOTS))
        with our_service(model, ["--max-loras", str(SLOTS)]) as service:
            service.push(adapters)
            warm_up(service.url, [MIX], key=service.key)
            for number in range(options.pairs):
                for is_watched in (True, False) if number % 2 else (False, True):
                    if is_watched:
                        taken, seen = watched_seconds_per_token(service, options.loops)
                        watched.append(taken)
                    else:
                        quiet.append(cpu_seconds_per_token(service, MIX, options.loops))
                print(
                    f"pair {number + 1}: {1e3 * quiet[-1]:.3f} ms a token, watched "
                    f"{1e3 * watched[-1]:.3f}",
                    flush=True,
                )
    recording = recording_seconds_per_token()
    readers = added(watched, quiet)
    whole = statistics.mean(quiet)
    engine = interval([seconds / (whole - seconds) for seconds in recording])
    total = Interval(
        readers.mean + engine.mean, readers.low + engine.low, readers.high + engine.high
    )
    rows = [
        ["3 open pages and a scrape every 5 s", str(readers)],
        ["recording in the engine", str(engine)],
        ["together", str(total)],
    ]
    verdict = "not told apart from"
    if total.high <= BAR:
        verdict = "within"
    elif total.low > BAR:
        verdict = "ABOVE"
    print(f"\n{markdown(('CPU seconds an output token', 'added'), rows)}\n")
    print(
        f"{verdict} the bar of {BAR:.0%}; {1e3 * whole:.2f} ms a token; recording "
        f"{1e6 * statistics.median(recording):.2f} us a token; {seen.page_bytes} bytes a page"
    )
    print(f"{time.monotonic() - started:.0f} s; {machine()}")
    write_json(
        options.json,
        {
            "machine": machine(),
            "quiet_seconds_per_token": quiet,
            "watched_seconds_per_token": watched,
            "recording_seconds_per_token": recording,
            "readers": asdict(readers),
            "recording": asdict(engine),
            "together": asdict(total),
        },
    )


if __name__ == "__main__":
    main()
