"""The compiled kernel itself. Not collected where there is no C++ compiler: see conftest."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_kernels import LoraBatch, LoraWeights, add_lora, choose_cpu_kernels
from lora_kernels.errors import KernelUnavailable
from lora_kernels.native_library import load_native_library
from lora_kernels.packed import PackedWeights
from tests.support.lora_cases import make_adapters, make_cpu_table, make_rows


def test_the_most_demanding_instruction_set_is_chosen():
    best = list(load_native_library().instruction_sets)[-1]
    kernels = choose_cpu_kernels()
    assert kernels.name == choose_cpu_kernels("native").name == f"native/{best}"
    assert kernels.fallback_reason is None


def test_an_instruction_set_that_the_machine_lacks_is_an_error():
    with pytest.raises(KernelUnavailable, match="no code for 'sse9'"):
        choose_cpu_kernels("native/sse9")


def test_a_library_of_other_sources_is_unavailable(tmp_path: Path):
    source, path = tmp_path / "old.c", tmp_path / "old.so"
    names = ("num_instruction_sets", "instruction_set", "add_lora")
    source.write_text(
        "int loraplex_abi_version() { return 0; }"
        + "".join(f"int loraplex_{name}() {{ return 0; }}" for name in names)
    )
    compiler = shutil.which("cc")
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(KernelUnavailable, match="other sources"):
        load_native_library(path)


def test_the_library_is_found_and_used_in_a_process_that_did_nothing_else():
    code = (
        "import torch; from lora_kernels import choose_cpu_kernels;"
        "assert choose_cpu_kernels('native').name.startswith('native/')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_weights_of_another_path_or_dtype_are_refused():
    [slices] = make_adapters(16, [8], [[4]])
    torch_table: Any = choose_cpu_kernels("torch").make_table(16, [8], 1, torch.float32)
    native_table: Any = choose_cpu_kernels("native").make_table(16, [8], 1, torch.float32)
    with pytest.raises(ValueError, match="LoraWeights cannot take PackedWeights"):
        torch_table.install(0, PackedWeights.pack(slices, torch.float32))
    with pytest.raises(ValueError, match="PackedWeights cannot take LoraWeights"):
        native_table.install(0, LoraWeights.fuse(slices, torch.float32))
    with pytest.raises(ValueError, match="bfloat16"):
        native_table.install(0, PackedWeights.pack(slices, torch.bfloat16))
    assert native_table.weights(0) is None


def test_rows_of_another_dtype_than_the_tables_are_refused():
    table = make_cpu_table(choose_cpu_kernels("native"), 16, [8], [[4]], dtype=torch.bfloat16)
    batch = LoraBatch.from_runs([0], [2])
    y, x = make_rows(table, batch, torch.float32)
    with pytest.raises(ValueError, match="the table is for"):
        add_lora(y, x, table, batch)


def test_transposed_outputs_are_refused():
    table = make_cpu_table(choose_cpu_kernels("native"), 16, [8], [[4]])
    batch = LoraBatch.from_runs([0], [8])
    y, x = make_rows(table, batch, torch.float32)
    with pytest.raises(ValueError, match="adjacent"):
        add_lora(y.T, x, table, batch)


@pytest.mark.parametrize("path", ["native", "torch"])
def test_a_table_without_slots_leaves_rows_as_they_are(path: str):
    table: Any = choose_cpu_kernels(path).make_table(16, [8, 4], 0, torch.float32)
    y = torch.ones(16, 12)
    add_lora(y, torch.ones(16, 16), table, LoraBatch.from_runs([None], [16]))
    assert torch.equal(y, torch.ones(16, 12))
