"""What a simulated step costs: `python -m benchmarks.simulation [--rounds N]`.

The published study's runs, quick and step by step in turn. CPU seconds of this process, per row of
a step (a token of a sequence, or a chunk of its prompt) and for a run of 1,500 requests; building
the requests is included. Takes a minute.
"""

import argparse
import time
from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.messages import EngineRequest
from engine.simulation.arrivals import poisson
from engine.simulation.driver import Simulation
from engine.simulation.published import OUTPUTS, PROMPTS, RUNS, STUDY
from engine.simulation.roofline import RooflineStepTime
from engine.simulation.study import NamedPolicy
from engine.simulation.workload import Traffic


def measure(policy: NamedPolicy, rate: float, *, quick: bool) -> tuple[float, int]:
    """CPU seconds and rows of one run."""
    began = time.process_time()
    width = policy.max_num_seqs
    config = SchedulerConfig(
        num_kv_blocks=STUDY.kv_blocks,
        block_size=STUDY.block_size,
        max_num_seqs=width,
        max_num_batched_tokens=policy.max_num_batched_tokens or width * STUDY.max_model_len,
        max_model_len=STUDY.max_model_len,
        max_loras=0,
        policy=policy.policy,
        enable_prefix_cache=False,
    )
    step_time = RooflineStepTime(STUDY.model, STUDY.gpu, policy.policy == "static")
    simulation = Simulation(config, step_time=step_time, quick=quick)
    for at, request in _requests(rate):
        simulation.send(at, request)
    report = simulation.run()
    return time.process_time() - began, report.num_rows


def _requests(rate: float) -> Iterable[tuple[float, EngineRequest]]:
    return Traffic(
        arrivals=lambda random: poisson(rate, random), prompts=PROMPTS, outputs=OUTPUTS,
        num_requests=STUDY.num_requests,
    ).requests(0)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    for policy, rate in RUNS:
        best = {
            quick: min(measure(policy, rate, quick=quick) for _ in range(rounds))
            for quick in (True, False)
        }
        (fast, rows), (slow, _) = best[True], best[False]
        print(
            f"{policy.name:14} {rate:4g}/s: {fast:5.2f} s, {fast / rows * 1e6:5.2f} us a row; "
            f"step by step {slow:5.2f} s, {slow / rows * 1e6:5.2f} us a row"
        )


if __name__ == "__main__":
    main()
