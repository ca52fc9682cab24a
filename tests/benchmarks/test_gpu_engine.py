"""`benchmarks/gpu_engine.py` on a CPU: every path, and with nothing but what it says it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = (
    "alembic", "anyio", "click", "httpx", "litestar", "llguidance", "msgspec", "obstore", "openai",
    "redis", "sqlalchemy", "structlog", "uvicorn", "zmq", "bitsandbytes", "torchao",
)  # fmt: skip
RUN = """
import runpy, sys
for name in {absent!r}:
    sys.modules[name] = None
sys.argv = ["benchmarks/gpu_engine.py", "--tiny", "--json", {path!r}]
runpy.run_path("benchmarks/gpu_engine.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("gpu_engine") / "figures.json"
    code = RUN.format(absent=ABSENT, path=str(path))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_measure_is_in_the_table_and_in_the_json(done):
    table, document = done
    measures = {result["measure"] for result in document["results"]}
    assert measures == {
        "copy bandwidth", "GEMM", "decode step, graph", "decode step, eager",
        "decode step with adapters", "token gap, median", "token gap, p99", "tokens a second",
    }  # fmt: skip
    for result in document["results"]:
        assert result["value"] > 0
        assert f"| {result['measure']} | {result['case']} | {result['value']:.4g} |" in table
    assert "all values are right" in table


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_peers_ran_beside_ours(done):
    _, document = done
    peers = {
        result["of_what"]: result["beside"]
        for result in document["results"]
        if result["measure"] == "tokens a second"
    }
    assert peers["PEFT adapter_names"] > 0
    assert set(peers) == {"PEFT adapter_names", "transformers batching"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wrong_value_is_found_and_nothing_is_timed():
    code = (
        "import os, sys; os.environ['TRITON_INTERPRET'] = '1'\n"
        "sys.path.insert(0, '.')\n"
        "import torch, benchmarks.gpu_engine as script, benchmarks.gpu_checks as checks\n"
        "exact = checks.merged\n"
        "def moved(weights, adapter):\n"
        "    made = exact(weights, adapter)\n"
        "    made.layers[1]['down'].mul_(1.01)\n"
        "    return made\n"
        "checks.merged = moved\n"
        "sys.exit(script.main(['--tiny', '--checks-only']))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "WRONG torch.float32: row 0: logits of slot None" in ran.stderr
    assert "decode step" not in ran.stdout


def test_without_a_device_it_says_so():
    ran = subprocess.run(
        [sys.executable, "benchmarks/gpu_engine.py"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.endswith("gpu_engine: there is no CUDA device here\n")
