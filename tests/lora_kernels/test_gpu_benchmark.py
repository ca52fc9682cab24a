"""The GPU benchmark's plan, arithmetic and baselines; its timings need a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_baselines import BASELINES
from benchmarks.gpu_cases import (
    ADAPTERS,
    RANKS,
    ROWS,
    Case,
    Cost,
    Rates,
    all_cases,
    expand_cost,
    make_workload,
    segments,
    shrink_cost,
)
from lora_kernels import LoraTable, LoraWeights
from lora_kernels.reference import add_lora_reference

ROOT = Path(__file__).parents[2]
SMALL = Case("small", (8, 4, 16), (3, 0, 2), in_features=32, slice_sizes=(24, 8))


def test_the_plan_covers_ranks_adapters_and_rows():
    cases = all_cases()
    uniform = {
        (case.ranks[0], case.num_adapters, case.num_rows)
        for case in cases
        if case.name == "uniform"
    }
    assert uniform == {
        (rank, adapters, rows)
        for rank in RANKS
        for adapters in ADAPTERS
        for rows in ROWS
        if rows >= adapters
    }
    assert len({case.name for case in cases}) == 6


def test_segments_are_those_with_rows():
    assert segments(SMALL) == [(0, 0, 3), (2, 3, 5)]


def test_costs_count_each_operand_once_and_true_ranks():
    one = Case("one", (16,), (1,), in_features=100, slice_sizes=(50,))
    assert shrink_cost(one, 2) == Cost(2 * (16 * 100 + 100) + 4 * 16, 2 * 16 * 100)
    assert expand_cost(one, 2) == Cost(2 * (16 * 50 + 2 * 50) + 4 * 16, 2 * 16 * 50)
    # Two slices; the adapter without rows costs nothing.
    row_ranks = 3 * 8 + 2 * 16
    assert shrink_cost(SMALL, 4) == Cost(
        4 * (2 * 24 * 32 + 5 * 32) + 4 * 2 * row_ranks, 2 * 2 * row_ranks * 32
    )
    assert expand_cost(SMALL, 4) == Cost(
        4 * (24 * 32 + 2 * 5 * 32) + 4 * 2 * row_ranks, 2 * row_ranks * 32
    )


def test_a_floor_is_the_slower_of_bytes_and_operations():
    rates = Rates(bytes_per_second=1e12, flops_per_second=1e14)
    assert Cost(10**6, 10**6).microseconds(rates) == pytest.approx(1.0)
    assert Cost(10**6, 10**9).microseconds(rates) == pytest.approx(10.0)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_baselines_add_what_the_reference_adds(baseline, dtype):
    work = make_workload(SMALL, dtype=dtype, device="cpu")
    table = LoraTable(32, [24, 8], 3)
    for slot, slices in enumerate(work.adapters):
        table.install(slot, LoraWeights.fuse(slices, dtype))
    expected, got = work.y.clone(), work.y.clone()
    add_lora_reference(expected, work.x, table, work.batch)
    BASELINES[baseline](work, got)()
    assert not torch.equal(got, work.y)
    assert gpu_kernels.is_close(got, expected.double(), dtype)
    assert gpu_kernels.is_close(gpu_kernels.exact(work), expected.double(), dtype)


def test_the_value_check_passes_right_kernels_and_names_wrong_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(gpu_kernels, "CHECKS", (SMALL,))
    monkeypatch.setattr(gpu_kernels, "TOLERANCE", {torch.bfloat16: 1.6e-2})
    baselines, missing = gpu_kernels.usable_baselines("cpu")
    assert baselines.keys() | missing.keys() == BASELINES.keys()
    assert list(gpu_kernels.wrong_values("cpu", baselines, architecture=90)) == []

    def broken(work, y):
        return lambda: y.fill_(float("nan"))

    wrong = list(gpu_kernels.wrong_values("cpu", {"broken": broken}, architecture=90))
    assert wrong == ["the baseline broken"]
    monkeypatch.setattr(gpu_kernels, "add_lora", lambda y, *_: y.add_(1.0))
    wrong = list(gpu_kernels.wrong_values("cpu", {}, architecture=90))
    assert len(wrong) == 4  # each variant and the picked one


def test_a_measured_row_has_every_column():
    ran: list[float] = []

    def microseconds(run) -> float:
        run()
        ran.append(float(len(ran) + 1))
        return ran[-1]

    row = gpu_kernels.measure(
        SMALL, microseconds, Rates(1e12, 1e14), 0.5, {}, device="cpu", architecture=90
    )
    assert len(row) == len(gpu_kernels.COLUMNS)
    found = dict(zip(gpu_kernels.COLUMNS, row, strict=True))
    assert (found["rank"], found["adapters"], found["rows"]) == ("8+16", "2", "5")
    assert (found["shrink"], found["expand"], found["both"]) == ("1.0", "2.0", "3.0")
    assert (found["invariant"], found["grouped_mm"], found["empty"]) == ("4.0", "-", "0.5")


def test_without_a_device_the_benchmark_says_so():
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_kernels.py")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (2, "gpu_kernels: there is no CUDA device here\n")
