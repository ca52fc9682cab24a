"""Our service and its peers under the same load, taking turns: `make bench-peers`.

    python -m benchmarks.serving.bench_peers [--loops N] [--passes N] [--minutes M] [--json FILE]

vLLM for CPUs runs twice, started without LoRA and with 8 adapter slots; prefix caching is off
everywhere. All servers stay up, and idle while it is another's turn. The first run installs vLLM
under `.cache/bench/` (3.4 GB).
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.serving.figures import machine, markdown, over_passes, write_json
from benchmarks.serving.load import warm_up
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import our_service
from benchmarks.serving.passes import (
    COLUMNS,
    Contender,
    Passes,
    gap_p99,
    ratio,
    row,
    take_turns,
    throughput,
    ttft_p99,
)
from benchmarks.serving.peers import PeerError, vllm
from benchmarks.serving.random_adapters import adapter_names, write_adapters

OURS_BASE = "Loraplex, base"
OURS_MIX8 = "Loraplex, mix8"
VLLM_BASE = "vLLM without LoRA, base"
VLLM_MIX8 = "vLLM with LoRA, mix8"


RATIOS = (
    ("tokens/s", OURS_MIX8, VLLM_MIX8, throughput),
    ("tokens/s", OURS_MIX8, VLLM_BASE, throughput),
    ("tokens/s", OURS_BASE, VLLM_BASE, throughput),
    ("tokens/s", OURS_MIX8, OURS_BASE, throughput),
    ("gap p99", OURS_MIX8, VLLM_BASE, gap_p99),
    ("TTFT p99", OURS_MIX8, VLLM_BASE, ttft_p99),
)


def ratio_table(taken: Mapping[str, Passes]) -> str:
    """Ours over theirs, for the runs that took place."""
    rows = [
        [f"{figure}: {over} / {under}", over_passes(ratio(taken, over, under, of), 2)]
        for figure, over, under, of in RATIOS
        if over in taken and under in taken
    ]
    return markdown(("ratio, pass by pass", "median (extremes)"), rows)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=42, help="begin no pass that ends later")
    parser.add_argument("--only", choices=("base", "mix8"), help="one kind of traffic")
    options = parser.parse_args()
    started = time.monotonic()
    model = model_dir(options)
    print(machine(), flush=True)
    wanted = (options.only,) if options.only else ("base", "mix8")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
        adapters = write_adapters(model, scratch, adapter_names(8))
        try:
            peers = {
                mix: stack.enter_context(
                    vllm(model, scratch / f"vllm-{mix}.log", adapters if mix == "mix8" else ())
                )
                for mix in wanted
            }
        except PeerError as error:
            sys.stderr.write(f"bench-peers: {error}\n")
            return 1
        ours = stack.enter_context(our_service(model, ["--max-loras", "8"]))
        ours.push(adapters)
        print(f"all servers run after {time.monotonic() - started:.0f} s", flush=True)
        contenders: list[Contender] = []
        for mix in wanted:
            ours_name, peer_name = (
                (OURS_BASE, VLLM_BASE) if mix == "base" else (OURS_MIX8, VLLM_MIX8)
            )
            contenders.append(Contender(ours_name, ours.url, mix, ours.key, usage=ours.usage))
            contenders.append(Contender(peer_name, peers[mix], mix))
        for contender in contenders:
            warm_up(contender.url, [contender.mix], key=contender.key)
        left = 60 * options.minutes - (time.monotonic() - started)
        taken = take_turns(contenders, passes=options.passes, loops=options.loops, seconds=left)
    print(f"\n{markdown(COLUMNS, [row(name, passes) for name, passes in taken.items()])}")
    print(f"\n{ratio_table(taken)}\n\n{time.monotonic() - started:.0f} s; {machine()}")
    runs = {name: passes.as_dict() for name, passes in taken.items()}
    write_json(options.json, {"machine": machine(), "loops": options.loops, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
