"""guidellm, an independent load generator, in an environment of its own under `.cache/`."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1] / ".cache" / "bench" / "guidellm"
# Its pins exclude ours (httpx, protobuf), so that only torch, the largest of them, is held to ours.
PACKAGES = ("guidellm==0.8.1", "torch==2.13.0")


@dataclass(frozen=True)
class Seen:
    """What it measured."""

    num_requests: int
    output_tokens_per_second: float
    ttft_p50_ms: float


def guidellm(home: Path = HOME) -> Path:
    """Its program; installed the first time."""
    program, ready = home / "bin" / "guidellm", home / ".installed"
    if not (ready.exists() and ready.read_text() == "\n".join(PACKAGES)):
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "-q", *PACKAGES], check=True)
        ready.write_text("\n".join(PACKAGES))
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
