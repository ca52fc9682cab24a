"""The GPU benchmark's part for the engine's kernels, in the interpreter; its times need a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_engine_kernels as bench
from benchmarks.gpu_cases import Rates
from engine.triton.kernel_costs import Dimensions

ROOT = Path(__file__).parents[2]
SMALL = Dimensions(
    name="small", hidden=32, heads=4, kv_heads=2, head_dim=16, inner=48, layers=2, vocab=500
)
CASES = (
    bench.AttentionCase("mixed", 4, 2, 16, ((0, 9), (20, 1), (17, 3))),
    bench.AttentionCase("fp8", 2, 1, 16, ((0, 1), (5, 20)), is_fp8=True, window=7, softcap=2.0),
)


def test_right_kernels_pass_and_wrong_ones_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "CHECKS", CASES)
    monkeypatch.setattr(bench, "TOLERANCE", {torch.float16: 4e-3})
    monkeypatch.setattr(bench, "draws", lambda _: ([1], [1]))
    assert list(bench.wrong_values("cpu", 90)) == []
    monkeypatch.setattr(bench, "exact_attention", lambda case, work: torch.zeros(()))
    monkeypatch.setattr(bench, "draws", lambda _: ([1], [2]))
    wrong = list(bench.wrong_values("cpu", 90))
    assert [name.split(":")[0] for name in wrong] == [
        "attention, mixed, torch.float16",
        "invariant attention, mixed, torch.float16",
        "attention, fp8, torch.float16",
        "invariant attention, fp8, torch.float16",
        "draws",
    ]


def test_draws_are_those_of_the_host():
    drawn, expected = bench.draws("cpu", vocab=3000)
    assert drawn == expected


def test_every_kernel_is_timed_at_every_batch():
    ran: list[str] = []

    def microseconds(run) -> float:
        run()
        ran.append("one")
        return 3.0

    rates = Rates(1e12, 1e14)
    rows = list(
        bench.measured(
            microseconds, rates, (SMALL,), (1, 3), device="cpu", architecture=90, context=20,
            prompt=18,
        )
    )  # fmt: skip
    assert len(rows) == len(ran) == 2 * 7 + 4
    assert all(len(row) == len(bench.COLUMNS) for row in rows)
    names = {row[1] for row in rows}
    assert names == {
        "attention", "attention, fp8", "add and norm", "activate", "rotate and store", "draw",
        "draw, top-p",
    }  # fmt: skip


def test_it_needs_no_library_that_a_gpu_machine_may_lack():
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'msgspec', 'structlog', 'llguidance', 'zmq'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import benchmarks.gpu_kernels\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
