"""From a new adapter to its first token: a tenant uploads 10 MB and calls it at once.

    python -m benchmarks.upload_first_token [--adapters N] [--json FILE]

A real service on the CPU, one client, one adapter after the other, each with weights of its own
that nothing has seen before: bfloat16, rank 16, all linears, 9.8 MB. The clock runs from the first
byte of the upload to the first text of a streamed reply; the upload ends with its answer, when the
version is published and durable. A second call of the same adapter shows what a first token costs
once it is resident: on a busy machine the ratio of the two says more than the seconds. Beside the
clock stands the CPU time of the service's processes, and after it each part of the way alone.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.figures import machine, markdown, percentile, write_json
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import OurService, our_service
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from benchmarks.upload_parts import parts_table, time_parts

WARM_UPS = 3
BAR_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """Seconds of one call, to its first text, and where the engine says they went."""

    first_token: float
    queue: float
    """In the engine's queue, the wait for weights included."""
    loading: float
    """Of this: until the weights were there."""
    prefill: float
    """From the first step to the first token."""


@dataclass(frozen=True, slots=True)
class Cold:
    """Seconds of one adapter."""

    upload: float
    """To the answer that it is published."""
    call: Call
    """From there to the first text."""
    resident: Call
    """A second call."""
    upload_cpu: float
    """Of all processes of the service, in ticks of 10 ms."""
    call_cpu: float
    resident_cpu: float

    @property
    def total(self) -> float:
        """From the first byte of the upload to the first text."""
        return self.upload + self.call.first_token


def measure(http: httpx.Client, service: OurService, folder: Path) -> Cold:
    """Upload an adapter and call it twice; deletes it after."""
    name = folder.name
    config = (folder / "adapter_config.json").read_bytes()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    files = {"config": ("config", config), "weights": ("weights", weights)}
    cpu = [service.cpu_seconds()]
    started = time.perf_counter()
    http.post("adapters", data={"name": name}, files=files).raise_for_status()
    upload = time.perf_counter() - started
    cpu.append(service.cpu_seconds())
    cold = call(http, name)
    cpu.append(service.cpu_seconds())
    resident = call(http, name)
    cpu.append(service.cpu_seconds())
    http.delete(f"adapters/{name}").raise_for_status()
    return Cold(upload, cold, resident, *(after - before for before, after in pairwise(cpu)))


def call(http: httpx.Client, model: str) -> Call:
    """Stream two tokens; the clock stops at the first text, the reply is read to its end."""
    asked = {
        "model": model, "prompt": "Once upon a time", "max_tokens": 2, "min_tokens": 2,
        "temperature": 0, "stream": True,
    }  # fmt: skip
    started, first = time.perf_counter(), 0.0
    timing: dict[str, Any] = {}
    with http.stream("POST", "completions", json=asked) as reply:
        if reply.status_code != 200:
            raise SystemExit(reply.read().decode())
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(chunk)
            if not first and any(choice["text"] for choice in chunk["choices"]):
                first = time.perf_counter() - started
            timing = chunk.get("loraplex", timing)
    return Call(first, *(timing[part] / 1e3 for part in ("queue_ms", "load_ms", "prefill_ms")))


COLUMNS = ("ms", "p50", "p90", "max", "CPU mean")


def table(results: Sequence[Cold]) -> str:
    """One row a part of the way; the CPU time is of all processes of the service."""
    colds, warm = [r.call for r in results], [r.resident for r in results]
    rows = [
        _row("upload, to the answer", [r.upload for r in results], [r.upload_cpu for r in results]),
        _row(
            "then to the first token",
            [c.first_token for c in colds],
            [r.call_cpu for r in results],
        ),
        _row("of this, in the queue", [c.queue for c in colds]),
        _row("of this, waiting for weights", [c.loading for c in colds]),
        _row("prefill", [c.prefill for c in colds]),
        _row(
            "upload to first token",
            [r.total for r in results],
            [r.upload_cpu + r.call_cpu for r in results],
        ),
        _row(
            "first token of a resident adapter",
            [c.first_token for c in warm],
            [r.resident_cpu for r in results],
        ),
        _row("of this, prefill", [c.prefill for c in warm]),
    ]
    return markdown(COLUMNS, rows)


def _row(name: str, seconds: Sequence[float], cpu: Sequence[float] | None = None) -> list[str]:
    figures = (percentile(seconds, 0.5), percentile(seconds, 0.9), max(seconds))
    mean = "" if cpu is None else f"{1e3 * statistics.mean(cpu):.0f}"
    return [name, *(f"{1e3 * value:.0f}" for value in figures), mean]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--adapters", type=int, default=30)
    options = parser.parse_args()
    model = model_dir(options)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as root:
        folders = write_adapters(model, Path(root), adapter_names(WARM_UPS + options.adapters))
        with our_service(model, []) as service:
            headers = {"authorization": f"Bearer {service.key}"}
            with httpx.Client(base_url=service.url, headers=headers, timeout=120) as http:
                results = [measure(http, service, folder) for folder in folders][WARM_UPS:]
        print(f"\n{table(results)}\n", flush=True)
        parts = time_parts(model, folders, Path(root) / "parts")
    print(f"{parts_table(parts)}\n")
    p50 = percentile([result.total for result in results], 0.5)
    ratio = p50 / percentile([result.resident.first_token for result in results], 0.5)
    print(f"Upload to first token takes {ratio:.1f} times the first token of a resident adapter.")
    verdict = "holds" if p50 <= BAR_SECONDS else "does NOT hold"
    print(f"The bar, p50 at most {BAR_SECONDS:g} s, {verdict}. {machine()}")
    write_json(options.json, {
        "machine": machine(),
        "adapters": [asdict(r) for r in results],
        "parts": {part: asdict(times) for part, times in parts.items()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
