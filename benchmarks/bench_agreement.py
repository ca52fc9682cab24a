"""`loraplex bench` beside guidellm, on an engine whose steps all take 300 ms.

    python -m benchmarks.bench_agreement [--model DIR] [--json FILE]

Both send the same loads, one after the other: one call at a time, and an open loop at a constant
rate. Throughput and median time to first token are to agree within 5%. Both count a first token
from when its call is sent, tokens as the usage says, and seconds from the first call to the last
end.

The loads are such that what comes out does not hang on a race of milliseconds, which a machine
that does anything else decides by chance. Several calls in a closed loop end in the same step, and
whether the next ones are all in time for the same step too decides whether each reply takes a step
more: 10% of it. A prompt takes four steps here, so that what a call waits for a step to begin
weighs little; and the open loop meets the steps at all their points. Takes two minutes and a core;
the first time guidellm is installed (some 80 MB, for it sees our packages).
"""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import guidellm
from benchmarks.paced_service import PacedService, paced_service
from benchmarks.serving.figures import machine, write_json
from benchmarks.serving.options import make_parser, model_dir
from engine.simulation.figures import Slo
from engine.simulation.workload import simulated_request
from loraplex.load.calls import CallFormat
from loraplex.load.run import Loop, run_load

STEP_SECONDS = 0.3
PROMPT, OUTPUT = 1800, 8
"""Four steps of 512 tokens, of which the last one draws; then seven more."""
SPACING = 5.618
"""Steps between two arrivals: prompts do not meet, replies do."""
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """The same in both tools' words."""

    name: str
    loop: Loop
    profile: Mapping[str, object]
    num_requests: int


RATE = 1 / (SPACING * STEP_SECONDS)
LOADS = (
    Load("one at a time", Loop("closed", 1), {"kind": "concurrent", "streams": [1]}, 3),
    Load("open loop", Loop("open", RATE), {"kind": "constant", "rate": [RATE]}, 10),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure."""

    load: str
    figure: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs

    @property
    def holds(self) -> bool:
        """Whether the two agree."""
        return abs(self.ratio - 1) <= TOLERANCE


def compare(service: PacedService, tokenizer: Path, load: Load) -> list[Compared]:
    """Send a load twice."""
    url = f"http://127.0.0.1:{service.port}"
    arrivals = [(n / RATE, simulated_request(n, PROMPT, OUTPUT)) for n in range(load.num_requests)]
    calls = list(CallFormat(model="base").calls(arrivals, seed=0))
    ours = asyncio.run(
        run_load(f"{url}/v1/", load.loop, calls, key=service.key, tenant_keys={}, slo=Slo())
    ).figures
    with tempfile.TemporaryDirectory() as folder:
        theirs = guidellm.load(
            url, service.key, "base", tokenizer, Path(folder), load.profile,
            requests=load.num_requests, prompt_tokens=PROMPT, output_tokens=OUTPUT,
        )  # fmt: skip
    if (ours.num_requests - ours.num_failed, theirs.num_requests) != (load.num_requests,) * 2:
        raise SystemExit(f"not all calls were served: {ours} {theirs}")
    return [
        Compared(
            load.name, "output tokens/s",
            ours.output_tokens_per_second, theirs.output_tokens_per_second,
        ),
        Compared(load.name, "TTFT p50, ms", ours.ttft_p50_ms, theirs.ttft_p50_ms),
    ]  # fmt: skip


def measure(model: Path) -> list[Compared]:
    """Both loads, on a service of their own."""
    guidellm.guidellm()
    with paced_service(model, STEP_SECONDS, has_whole_steps=True) as service:
        return [one for load in LOADS for one in compare(service, model, load)]


def main() -> None:
    options = make_parser(__doc__).parse_args()
    print(machine(), flush=True)
    found = measure(model_dir(options))
    write_json(options.json, {"figures": [asdict(one) | {"ratio": one.ratio} for one in found]})
    for one in found:
        print(
            f"{one.load}, {one.figure}: ours {one.ours:.1f}, guidellm {one.theirs:.1f}, "
            f"ratio {one.ratio:.3f}"
        )
    if not all(one.holds for one in found):
        raise SystemExit("the two disagree")


if __name__ == "__main__":
    main()
