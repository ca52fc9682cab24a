"""What it costs to be watched: `python -m benchmarks.metrics_cost [--pairs N] [--json FILE]`.

A real `loraplex serve` with 8 adapter slots is under the load `mix8` all the time; in one window of
each pair three dashboards are open and a Prometheus scrapes every 5 s. Which comes first is drawn.
Windows are compared by the CPU seconds of all of the service's processes for an output token. The
journal of the engine cannot be taken out of a service, so what it adds is measured beside it, on
the step loop without a model, and is part of the whole, which has to stay below 2%.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks.recording import recording_seconds_per_token
from benchmarks.serving.figures import machine, markdown, write_json
from benchmarks.serving.intervals import Interval, interval
from benchmarks.serving.load import warm_up
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import OurService, our_service
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from benchmarks.serving.steady import Window, steady_load, window
from benchmarks.watchers import SCRAPE_SECONDS, Seen, watching

BAR = 0.02
MIX = "mix8"
SLOTS = 8
SECONDS = 2 * SCRAPE_SECONDS


def watched_window(service: OurService) -> tuple[Window, Seen]:
    """A window in which dashboards are open and metrics are scraped."""
    with watching(service.service.url, service.service.admin_key) as seen:
        seen.ready.wait()
        taken = window(service, SECONDS)
    if seen.errors:
        raise RuntimeError(f"the watchers did not see what they should: {seen.errors}")
    return taken, seen


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    started = time.monotonic()
    model = model_dir(options)
    random = Random(0)
    print(machine(), flush=True)
    pairs: list[tuple[Window, Window]] = []
    seen = Seen()
    with TemporaryDirectory(prefix="loraplex-bench-") as folder:
        adapters = write_adapters(model, Path(folder), adapter_names(SLOTS))
        with our_service(model, ["--max-loras", str(SLOTS)]) as service:
            service.push(adapters)
            warm_up(service.url, [MIX], key=service.key)
            with steady_load(service, MIX):
                window(service, SECONDS)  # all seats are taken after it
                for number in range(options.pairs):
                    if random.random() < 0.5:
                        quiet = window(service, SECONDS)
                        watched, seen = watched_window(service)
                    else:
                        watched, seen = watched_window(service)
                        quiet = window(service, SECONDS)
                    pairs.append((quiet, watched))
                    print(
                        f"pair {number + 1}: {1e3 * quiet.whole:.3f} ms a token, watched "
                        f"{1e3 * watched.whole:.3f}",
                        flush=True,
                    )
    recording = recording_seconds_per_token()

    def readers(part: Callable[[Window], float]) -> Interval:
        return interval([(part(w) - part(q)) / q.whole for q, w in pairs])

    whole = statistics.mean(quiet.whole for quiet, _ in pairs)
    engine = interval([seconds / (whole - seconds) for seconds in recording])
    watching_adds = readers(lambda taken: taken.whole)
    total = Interval(
        watching_adds.mean + engine.mean,
        watching_adds.low + engine.low,
        watching_adds.high + engine.high,
    )
    rows = [
        ["3 open pages and a scrape every 5 s: API", str(readers(lambda taken: taken.api))],
        ["... supervisor and workers", str(readers(lambda taken: taken.other))],
        ["... engine", str(readers(lambda taken: taken.engine))],
        ["... all processes", str(watching_adds)],
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
            "window_seconds": SECONDS,
            "quiet_seconds_per_token": [asdict(quiet) for quiet, _ in pairs],
            "watched_seconds_per_token": [asdict(watched) for _, watched in pairs],
            "recording_seconds_per_token": recording,
            "readers": asdict(watching_adds),
            "recording": asdict(engine),
            "together": asdict(total),
        },
    )


if __name__ == "__main__":
    main()
