"""The ahead-of-time report: complete, and without a fault on the GPU of today."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.triton.compile_cases import ARCHITECTURES, DTYPES, AttentionCase, all_cases
from engine.triton.compile_report import MAX_SHARED_BYTES
from engine.triton.tiles import attention_tile

ROOT = Path(__file__).parents[3]
KERNELS = (
    "paged_attention", "combine_splits", "rms_norm", "gated_activation", "rotate_and_store",
    "store_kv", "score", "limit", "race", "best", "finish",
)  # fmt: skip


def test_the_report_covers_every_kernel_tile_and_dtype():
    names = {
        call.kernel.__name__.removesuffix("_kernel")
        for case in all_cases()
        for call in case.calls(90)
    }
    assert names == set(KERNELS)
    for architecture in ARCHITECTURES:
        tiles = {
            (
                case.kind,
                attention_tile(case.kind, 4, case.head_dim, DTYPES[case.dtype], architecture),
            )
            for case in all_cases()
            if isinstance(case, AttentionCase)
        }
        for kind in ("decode", "chunk"):
            for head_dim in (16, 128, 256):
                for dtype in DTYPES.values():
                    assert (kind, attention_tile(kind, 4, head_dim, dtype, architecture)) in tiles
    assert MAX_SHARED_BYTES.keys() == set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_kernel_spills_or_moves_less_than_it_can_on_hopper():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    report = subprocess.run(
        [sys.executable, "-m", "engine.triton.compile_report", "90"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert report.returncode == 0, report.stdout + report.stderr
    assert " 0 faults" in report.stdout
    for kernel in KERNELS:
        assert f"| {kernel} |" in report.stdout
