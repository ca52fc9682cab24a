"""What loaded adapters cost those who use none: `python -m benchmarks.unused_adapters [--pairs N]`.

Two real services, one started without LoRA and one with 8 adapters resident, get the workload
`base` in interleaved pairs, each first in every second pair. They are compared by the CPU seconds
of all their processes for an output token, with a 95% interval.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.serving.figures import machine, write_json
from benchmarks.serving.intervals import added
from benchmarks.serving.load import warm_up
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import one_token, our_service
from benchmarks.serving.passes import cpu_seconds_per_token
from benchmarks.serving.random_adapters import adapter_names, write_adapters

SLOTS = 8


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--loops", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    model = model_dir(options)
    print(machine(), flush=True)
    taken: dict[str, list[float]] = {"none": [], "loaded": []}
    with TemporaryDirectory(prefix="loraplex-bench-") as folder:
        adapters = write_adapters(model, Path(folder), adapter_names(SLOTS))
        with (
            our_service(model, ["--max-loras", "0"]) as plain,
            our_service(model, ["--max-loras", str(SLOTS)]) as ours,
        ):
            ours.push(adapters)
            for adapter in adapters:
                one_token(ours.service.url, ours.key, adapter.name)
            services = {"none": plain, "loaded": ours}
            for service in services.values():
                warm_up(service.url, ["base"], key=service.key)
            for number in range(options.pairs):
                order = list(services.items())
                for name, service in order if number % 2 else reversed(order):
                    taken[name].append(cpu_seconds_per_token(service, "base", options.loops))
                none, loaded = taken["none"][-1], taken["loaded"][-1]
                print(
                    f"pair {number + 1}: {1e3 * none:.3f} ms a token without LoRA, "
                    f"{1e3 * loaded:.3f} with {SLOTS} adapters loaded",
                    flush=True,
                )
    more = added(taken["loaded"], taken["none"])
    print(f"\nCPU seconds an output token of the base, {SLOTS} adapters loaded: {more}")
    print(f"{time.monotonic() - started:.0f} s; {machine()}")
    write_json(options.json, {"machine": machine(), "cpu_seconds_per_token": taken})


if __name__ == "__main__":
    main()
