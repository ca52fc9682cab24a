import gc
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapter_store.base_model import read_base_model
from adapter_store.safetensors_header import TensorInfo, read_header
from engine.runner.adapter_weights import load_adapter
from engine.runner.tensor_file import TensorFile
from tests.support.model_lab import digest_of
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_those_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "vector": torch.tensor([0.5, -2.0], dtype=dtype),
        "scalar": torch.tensor(3.0, dtype=dtype),
        "empty": torch.empty((0, 4), dtype=dtype),
    }
    path = tmp_path / "some.safetensors"
    save_file(saved, path)
    file, header = TensorFile(path), read_header(path)
    read = {name: file.tensor(info) for name, info in header.tensors.items()}
    path.unlink()
    for name, tensor in saved.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor)


def test_a_tensor_may_begin_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(b"x" + torch.tensor([1.5, 2.5]).numpy().tobytes())
    read = TensorFile(path).tensor(TensorInfo("F32", (2,), 1, 9))
    assert read.tolist() == [1.5, 2.5]


def test_a_file_that_is_gone_or_became_shorter_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(7))
    with pytest.raises(OSError, match="has 7 bytes, not 8"):
        TensorFile(path).tensor(TensorInfo("F32", (2,), 0, 8))
    path.write_bytes(b"")
    with pytest.raises(OSError):
        TensorFile(path).tensor(TensorInfo("F32", (2,), 0, 8))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        TensorFile(path)


def test_what_an_adapter_took_is_given_back_however_often_it_is_loaded(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "base", "llama")
    folder = make_tiny_adapter(
        tmp_path / "adapter", model_dir, seed=0, r=4, target_modules="all-linear", use_dora=True
    )
    base, digest = read_base_model(model_dir), digest_of(folder)

    def allocated_after(num_loads: int) -> int:
        for _ in range(num_loads):
            assert load_adapter(folder, digest, base, max_rank=8, dtype=torch.bfloat16).nbytes
        gc.collect()
        return sys.getallocatedblocks()

    counts = [allocated_after(15) for _ in range(6)]
    # Caches fill up at first; one object kept of each tensor would be 15 x 60 in every round.
    assert min(after - before for before, after in pairwise(counts)) < 100
