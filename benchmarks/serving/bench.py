"""Our service through HTTP, beside what the machine allows: `make bench`.

    python -m benchmarks.serving.bench [--loops N] [--passes N] [--minutes M] [--json FILE]

A real `loraplex serve` with 8 adapter slots gets `base`, `mix8` and `zipf16` (16 adapters) in
turn, and one started without adapters gets `base`; the client shares their cores. Before them, in
the same run, `benchmarks/step_profile.py` measures where a step's time goes and the floor, and
`benchmarks/quantized_steps.py` what a base in int8 costs beside bfloat16.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.floor import tokens_per_second
from benchmarks.serving.figures import machine, markdown, over_passes, write_json
from benchmarks.serving.load import read_workload, warm_up
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import OurService, one_token, our_service
from benchmarks.serving.passes import (
    COLUMNS,
    Contender,
    Passes,
    ratio,
    row,
    take_turns,
    throughput,
)
from benchmarks.serving.random_adapters import adapter_names, write_adapters

PLAIN = "base, started without LoRA"
BASE = "base, 8 adapters loaded"
MIX8 = "mix8"
ZIPF16 = "zipf16 on 8 slots"
RATIOS = ((MIX8, BASE), (ZIPF16, MIX8), (BASE, PLAIN))
SLOTS = 8
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a service takes apart from time."""

    first_token_seconds: float
    engine_peak: int
    """Bytes."""
    api_peak: int


def measure_adapter_bytes(service: OurService, folders: Sequence[Path]) -> float:
    """Engine memory per adapter that becomes resident; the engine has served the base before."""
    service.push(folders)
    before = service.memory("RssAnon")
    for folder in folders:
        one_token(service.service.url, service.key, folder.name)
    return (service.memory("RssAnon") - before) / len(folders)


def workload_rate(prefill: float, decode: float) -> float:
    """Output tokens a second if the workload's prompts were prefilled in steps of 512 tokens that
    take `prefill` ms, and its outputs decoded 32 at a time in steps of `decode` ms."""
    calls = read_workload("base")
    return tokens_per_second(
        sum(len(call.prompt) for call in calls),
        sum(call.max_tokens for call in calls),
        prefill / 512,
        decode / 32,
    )


def engine_rates(profile: Mapping[str, Any], decode: str) -> dict[str, float]:
    """The workload's rate with the engine's own steps, and with the floor's."""
    prefill, decoding = profile["prefill 512, 4 adapters"], profile[decode]
    lora = {"engine": prefill["parts_ms"]["LoRA"], "floor": prefill["floor_ms"]["LoRA"]}
    if decode != "decode, base":
        lora = dict.fromkeys(lora, 0.0)  # else the same chunk is counted without its LoRA
    return {
        "engine alone": workload_rate(prefill["step_ms"] - lora["engine"], decoding["step_ms"]),
        "floor": workload_rate(
            sum(prefill["floor_ms"].values()) - lora["floor"], sum(decoding["floor_ms"].values())
        ),
    }


def profile_steps(model: Path, scratch: Path, repeats: int) -> tuple[str, dict[str, Any]]:
    """Run `benchmarks.step_profile`; returns its text and figures."""
    text, figures = _measure_apart("step_profile", model, scratch, "--repeats", str(repeats))
    return text, figures["profiles"]


def quantized_steps(model: Path, scratch: Path, passes: int) -> tuple[str, dict[str, Any]]:
    """Run `benchmarks.quantized_steps`, where its library is; returns its text and figures."""
    if find_spec("torchao") is None:
        return "No quantised base: it needs loraplex[quantization]", {}
    options = ("--passes", str(passes), "--minutes", "0.75")
    return _measure_apart("quantized_steps", model, scratch, *options)


def _measure_apart(
    name: str, model: Path, scratch: Path, *options: str
) -> tuple[str, dict[str, Any]]:
    path = scratch / f"{name}.json"
    command = [
        sys.executable, "-m", f"benchmarks.{name}", "--model", str(model), "--json", str(path),
    ]  # fmt: skip
    # As the supervisor starts an engine.
    environment = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"} | os.environ
    done = subprocess.run(
        [*command, *options], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return done.stdout, json.loads(path.read_text())


def summary(
    taken: Mapping[str, Passes], footprints: Mapping[str, Footprint], adapter_bytes: float,
    profile: Mapping[str, Any],
) -> str:  # fmt: skip
    """All tables."""
    costs = [
        [
            name,
            over_passes([u.as_dict()["engine_cpu_ms_per_token"] for u in passes.usages], 2),
            over_passes([u.as_dict()["api_cpu_ms_per_token"] for u in passes.usages], 2),
            over_passes([u.as_dict()["tokens_per_step"] for u in passes.usages], 1),
        ]
        for name, passes in taken.items()
    ]
    feet = [
        [
            name,
            f"{foot.first_token_seconds:.1f}",
            f"{foot.engine_peak / MEBIBYTE:.0f}",
            f"{foot.api_peak / MEBIBYTE:.0f}",
        ]
        for name, foot in footprints.items()
    ]
    ratios = [[f"{a} / {b}", over_passes(ratio(taken, a, b, throughput), 2)] for a, b in RATIOS]
    for name, decode in ((BASE, "decode, base"), (MIX8, "decode, 8 adapters")):
        for what, rate in engine_rates(profile, decode).items():
            reached = [throughput(result) / rate for result in taken[name].results]
            ratios.append([f"{name} / its {what}, {rate:.0f} tokens/s", over_passes(reached, 2)])
    tables = [
        markdown(COLUMNS, [row(name, passes) for name, passes in taken.items()]),
        markdown(("throughput", "ratio"), ratios),
        markdown(("CPU and steps", "engine ms a token", "API ms a token", "tokens a step"), costs),
        markdown(("service", "first token s", "engine peak MiB", "API peak MiB"), feet),
        f"Engine memory per resident adapter: {adapter_bytes / MEBIBYTE:.1f} MiB",
    ]
    return "\n\n".join(tables)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=7.5, help="begin no pass that ends later")
    parser.add_argument("--profile-repeats", type=int, default=4)
    parser.add_argument("--quantized-passes", type=int, default=2)
    options = parser.parse_args()
    started = time.monotonic()
    model = model_dir(options)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        scratch = Path(folder)
        adapters = write_adapters(model, scratch, adapter_names(16))
        text, profile = profile_steps(model, scratch, options.profile_repeats)
        print(text, flush=True)
        text, quantized = quantized_steps(model, scratch, options.quantized_passes)
        print(text, flush=True)
        with (
            our_service(model, ["--max-loras", "0"]) as plain,
            our_service(model, ["--max-loras", str(SLOTS)]) as ours,
        ):
            warm_up(plain.url, ["base"], key=plain.key)
            warm_up(ours.url, ["base"], key=ours.key)
            adapter_bytes = measure_adapter_bytes(ours, adapters[:SLOTS])
            ours.push(adapters[SLOTS:])
            warm_up(ours.url, ["zipf16", "mix8"], key=ours.key)
            contenders = [Contender(PLAIN, plain.url, "base", plain.key, usage=plain.usage)]
            contenders += [
                Contender(name, ours.url, mix, ours.key, usage=ours.usage)
                for name, mix in ((BASE, "base"), (MIX8, "mix8"), (ZIPF16, "zipf16"))
            ]
            left = 60 * options.minutes - (time.monotonic() - started)
            taken = take_turns(contenders, passes=options.passes, loops=options.loops, seconds=left)
            footprints = {
                name: Footprint(
                    service.first_token_seconds,
                    service.memory("VmHWM"),
                    service.memory("VmHWM", "api"),
                )
                for name, service in (("without LoRA", plain), (f"{SLOTS} slots", ours))
            }
    print(f"\n{summary(taken, footprints, adapter_bytes, profile)}")
    print(f"\n{time.monotonic() - started:.0f} s; {machine()}")
    write_json(
        options.json,
        {
            "machine": machine(),
            "loops": options.loops,
            "profile": profile,
            "quantized": quantized,
            "adapter_bytes": adapter_bytes,
            "footprints": {name: asdict(foot) for name, foot in footprints.items()},
            "runs": {name: passes.as_dict() for name, passes in taken.items()},
        },
    )


if __name__ == "__main__":
    main()
