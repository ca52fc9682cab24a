import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapter_store.safetensors_header import read_header
from adapter_store.tensor_scan import CHUNK_BYTES, TensorScan, scan_tensor, tensors_equal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def scan(path: Path, tensor: torch.Tensor) -> TensorScan:
    save_file({"before": torch.ones(3, dtype=torch.bfloat16), "x": tensor}, path)
    with path.open("rb") as file:
        return scan_tensor(file, read_header(path).tensors["x"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_looked_at(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also those on both sides of a chunk's end, and the last of a partial chunk."""
    per_chunk = CHUNK_BYTES // torch.empty(0, dtype=dtype).element_size()
    size = 2 * per_chunk + 5
    zeros = torch.zeros(size, dtype=dtype)
    assert scan(tmp_path / "x", zeros) == TensorScan(is_finite=True, is_zero=True)
    for position in (0, per_chunk - 1, per_chunk, size - 1):
        tensor = zeros.clone()
        tensor[position] = 1
        assert scan(tmp_path / "x", tensor) == TensorScan(is_finite=True, is_zero=False)
        tensor[position] = float("-inf")
        assert not scan(tmp_path / "x", tensor).is_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern_is_judged_as_torch_does(dtype: torch.dtype, tmp_path: Path) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for part in patterns.split(1024):
        expected = TensorScan(
            is_finite=bool(part.isfinite().all()),
            is_zero=bool((part == 0).all()),
        )
        assert scan(tmp_path / "x", part.clone()) == expected
    for part in (patterns[:1], patterns[2**15 : 2**15 + 1]):
        assert scan(tmp_path / "x", part.clone()).is_zero


@pytest.mark.parametrize("mine", DTYPES)
@pytest.mark.parametrize("theirs", DTYPES)
def test_equal_means_the_same_values_in_float32(
    mine: torch.dtype, theirs: torch.dtype, tmp_path: Path
) -> None:
    size = CHUNK_BYTES // 4 + 3
    values = torch.arange(size, dtype=torch.float32).remainder(128)
    paths = tmp_path / "mine", tmp_path / "theirs"
    save_file({"x": values.to(mine)}, paths[0])
    for last, equal in ((values[-1], True), (values[-1] + 1, False)):
        other = values.clone()
        other[-1] = last
        save_file({"x": other.to(theirs)}, paths[1])
        infos = [read_header(path).tensors["x"] for path in paths]
        with paths[0].open("rb") as file, paths[1].open("rb") as other_file:
            assert tensors_equal(file, infos[0], other_file, infos[1]) is equal


def test_memory_stays_flat(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"x": torch.ones(48 << 20, dtype=torch.bfloat16)}, path)
    info = read_header(path).tensors["x"]
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            assert scan_tensor(file, info).is_finite
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * CHUNK_BYTES
