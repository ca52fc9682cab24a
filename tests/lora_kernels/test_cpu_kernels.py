"""Which CPU path is chosen, and what the compiled one keeps of an adapter."""

from pathlib import Path

import pytest
import torch

from lora_kernels import LoraWeights, choose_cpu_kernels
from lora_kernels.errors import KernelUnavailable
from lora_kernels.native_library import load_native_library
from lora_kernels.packed import PackedWeights
from tests.support.lora_cases import make_adapters


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch):
    def unavailable() -> None:
        raise KernelUnavailable("it was not built")

    monkeypatch.setattr("lora_kernels.cpu_kernels.load_native_library", unavailable)


def test_without_the_compiled_kernel_auto_falls_back_and_says_why(no_library):
    kernels = choose_cpu_kernels("auto")
    assert kernels.name == "torch"
    assert kernels.fallback_reason is not None and "not built" in kernels.fallback_reason


def test_without_the_compiled_kernel_asking_for_it_is_an_error(no_library):
    with pytest.raises(KernelUnavailable, match="not built"):
        choose_cpu_kernels("native")


@pytest.mark.parametrize("choice", ["cuda", "torch/avx2", ""])
def test_a_path_that_does_not_exist_is_refused(choice):
    with pytest.raises(ValueError, match="auto, native or torch"):
        choose_cpu_kernels(choice)


def test_a_file_that_is_no_library_is_unavailable(tmp_path: Path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(KernelUnavailable, match="cannot be loaded"):
        load_native_library(path)


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
