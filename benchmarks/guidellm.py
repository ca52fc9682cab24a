"""guidellm, an independent load generator, in an environment of its own under `.cache/`.

It finds our packages behind its own, so that a fresh install fetches neither torch nor transformers
again, but what we have not and what its pins exclude of ours: some 80 MB. Ours stay as they are.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1] / ".cache" / "bench" / "guidellm"
PACKAGE = "guidellm==0.8.1"


@dataclass(frozen=True)
class Seen:
    """What it measured."""

    num_requests: int
    output_tokens_per_second: float
    ttft_p50_ms: float


def guidellm(home: Path = HOME) -> Path:
    """Its program; installed the first time."""
    ours = sysconfig.get_path("purelib")
    program, ready, state = home / "bin" / "guidellm", home / ".installed", f"{PACKAGE}\n{ours}\n"
    if not (ready.exists() and ready.read_text() == state):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        [packages] = (home / "lib").glob("python3*/site-packages")
        (packages / "ours.pth").write_text(f"{ours}\n")
        install = ["install", "-q", "--no-warn-conflicts", PACKAGE]
        subprocess.run([str(home / "bin" / "pip"), *install], check=True)
        ready.write_text(state)
    return program


def load(
    url: str, key: str, model: str, tokenizer: Path, folder: Path, profile: Mapping[str, object],
    *, requests: int, prompt_tokens: int, output_tokens: int,
) -> Seen:  # fmt: skip
    """One run of `profile`, in its own words; its own report, read back."""
    scenario, report = folder / "scenario.json", folder / "report.json"
    spec = {
        "backend": {
            "kind": "openai_http", "target": url, "model": model, "api_key": key,
            "request_format": "/v1/completions", "validate_backend": False, "http2": False,
        },
        "profile": profile,
        "constraints": [{"kind": "max_requests", "count": requests}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer)},
        "data": [
            {
                "kind": "synthetic_text", "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
            }
        ],
    }  # fmt: skip
    metadata = {"name": "one-run", "description": "One run."}
    scenario.write_text(json.dumps({"metadata": metadata, "spec": spec}))
    subprocess.run(
        [str(guidellm()), "run", "-c", str(scenario), "--output", f"kind=json,path={report}",
         "--disable-console"],
        check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=folder,
    )  # fmt: skip
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    return Seen(
        num_requests=metrics["request_totals"]["successful"],
        output_tokens_per_second=metrics["output_tokens_per_second"]["successful"]["mean"],
        ttft_p50_ms=metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p50"],
    )
