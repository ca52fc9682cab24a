"""From a new adapter to its first token: a tenant uploads 10 MB and calls it at once.

    python -m benchmarks.upload_first_token [--adapters N] [--json FILE]

A real service on the CPU, one client, one adapter after the other, each with weights of its own
that nothing has seen before: bfloat16, rank 16, all linears, 9.8 MB. The clock runs from the first
byte of the upload to the first text of a streamed reply; the upload ends with its answer, when the
version is published and durable. A second call of the same adapter shows what a first token costs
once it is resident.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.serving.figures import machine, markdown, percentile, write_json
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import our_service
from benchmarks.serving.random_adapters import adapter_names, write_adapters

WARM_UPS = 3
BAR_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Cold:
    """Seconds of one adapter."""

    upload: float
    """To the answer that it is published."""
    first_token: float
    """From there to the first text."""
    loading: float
    """Of these: what the engine waited for the weights."""
    resident_first_token: float
    """Of a second call."""

    @property
    def total(self) -> float:
        """From the first byte of the upload to the first text."""
        return self.upload + self.first_token


def measure(http: httpx.Client, folder: Path) -> Cold:
    """Upload an adapter and call it twice; deletes it after."""
    name = folder.name
    config = (folder / "adapter_config.json").read_bytes()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    files = {"config": ("config", config), "weights": ("weights", weights)}
    started = time.perf_counter()
    http.post("adapters", data={"name": name}, files=files).raise_for_status()
    uploaded = time.perf_counter()
    first, loading = first_text(http, name)
    again = time.perf_counter()
    second, _ = first_text(http, name)
    http.delete(f"adapters/{name}").raise_for_status()
    return Cold(uploaded - started, first - uploaded, loading, second - again)


def first_text(http: httpx.Client, model: str) -> tuple[float, float]:
    """When the first text came, and for how long the engine waited for weights before it."""
    asked = {
        "model": model, "prompt": "Once upon a time", "max_tokens": 2, "min_tokens": 2,
        "temperature": 0, "stream": True,
    }  # fmt: skip
    first, loading = 0.0, 0.0
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
                first = time.perf_counter()
            if "loraplex" in chunk:
                loading = chunk["loraplex"]["load_ms"] / 1e3
    return first, loading


COLUMNS = ("ms", "p50", "p90", "max")


def table(results: Sequence[Cold]) -> str:
    """One row a part of the way."""
    parts = {
        "upload, to the answer": [r.upload for r in results],
        "then to the first token": [r.first_token for r in results],
        "of this, waiting for weights": [r.loading for r in results],
        "upload to first token": [r.total for r in results],
        "first token of a resident adapter": [r.resident_first_token for r in results],
    }
    rows = [
        [name, *(f"{1e3 * v:.0f}" for v in (percentile(s, 0.5), percentile(s, 0.9), max(s)))]
        for name, s in parts.items()
    ]
    return markdown(COLUMNS, rows)


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
                results = [measure(http, folder) for folder in folders][WARM_UPS:]
    print(f"\n{table(results)}\n")
    p50 = percentile([result.total for result in results], 0.5)
    verdict = "holds" if p50 <= BAR_SECONDS else "does NOT hold"
    print(f"The bar, p50 at most {BAR_SECONDS:g} s, {verdict}. {machine()}")
    write_json(options.json, {"machine": machine(), "adapters": [asdict(r) for r in results]})


if __name__ == "__main__":
    main()
