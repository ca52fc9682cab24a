"""Which CPU path is chosen, and what the compiled one keeps of an adapter."""

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


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch):
    def unavailable() -> None:
        raise KernelUnavailable("it was not built")

    monkeypatch.setattr("lora_kernels.cpu_kernels.load_native_library", unavailable)


def test_the_most_demanding_instruction_set_is_chosen():
    best = list(load_native_library().instruction_sets)[-1]
    kernels = choose_cpu_kernels()
    assert kernels.name == choose_cpu_kernels("native").name == f"native/{best}"
    assert kernels.fallback_reason is None


def test_without_the_compiled_kernel_auto_falls_back_and_says_why(no_library):
    kernels = choose_cpu_kernels("auto")
    assert kernels.name == "torch"
    assert kernels.fallback_reason is not None and "not built" in kernels.fallback_reason


def test_without_the_compiled_kernel_asking_for_it_is_an_error(no_library):
    with pytest.raises(KernelUnavailable, match="not built"):
        choose_cpu_kernels("native")


def test_an_instruction_set_that_the_machine_lacks_is_an_error():
    with pytest.raises(KernelUnavailable, match="no code for 'sse9'"):
        choose_cpu_kernels("native/sse9")


@pytest.mark.parametrize("choice", ["cuda", "torch/avx2", ""])
def test_a_path_that_does_not_exist_is_refused(choice):
    with pytest.raises(ValueError, match="auto, native or torch"):
        choose_cpu_kernels(choice)


def test_a_file_that_is_no_library_is_unavailable(tmp_path: Path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(KernelUnavailable, match="cannot be loaded"):
        load_native_library(path)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_features", [1, 37, 64])
@pytest.mark.parametrize("ranks", [[1, None, 9], [70, 0, 256], [16, 16, 16], [None, None, 5]])
def test_packed_weights_give_back_their_slices(dtype, in_features, ranks):
    [slices] = make_adapters(in_features, [130, 8, 1], [ranks])
    packed = PackedWeights.pack(slices, dtype)
    fused = LoraWeights.fuse(slices, dtype)
    for index in range(3):
        got, expected = packed.slice(index), fused.slice(index)
        if expected is None:
            assert got is None
            continue
        assert got is not None and got.a.dtype is dtype and got.scaling == expected.scaling
        assert torch.equal(got.a.float(), expected.a) and torch.equal(got.b.float(), expected.b)


def test_packed_weights_cost_their_true_rank():
    def size(*ranks: int) -> int:
        [slices] = make_adapters(576, [576, 192, 192], [ranks])
        return PackedWeights.pack(slices, torch.bfloat16).nbytes

    values = 16 * (3 * 576 + 576 + 192 + 192)
    assert 2 * values <= size(16, 16, 16) <= 2.05 * values
    assert size(8, 8, 8) < 0.53 * size(16, 16, 16)


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
