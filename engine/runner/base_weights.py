"""Single tensors of the base, read again when an adapter that depends on them is loaded."""

import torch
from torch import Tensor

from adapter_store.base_model import BaseModel
from engine.quantization.scheme import Scheme
from engine.runner.tensor_file import TensorFile
from lora_kernels import LoraSlice

_CHUNK_ROWS = 4096


def read_base_bias(base: BaseModel, module: str, dtype: torch.dtype) -> Tensor | None:
    """[out_features] float32 with values of the model's dtype; None where there is none."""
    stored = base.tensors.get(f"{module}.bias")
    if stored is None:
        return None
    bias = TensorFile(stored.file).tensor(stored.info)
    return bias.to(dtype).to(torch.float32)


def adapted_row_norms(
    base: BaseModel,
    module: str,
    part: LoraSlice,
    dtype: torch.dtype,
    scheme: Scheme | None = None,
) -> Tensor:
    """[out_features] float32: the norm of each row of ``W + scaling * B @ A``.

    DoRA (arXiv:2402.09353) divides by these. W, A and B are rounded to `dtype`, as in the model.
    With a `scheme`, W is quantised as in the model; without one it is read in chunks.
    """
    stored = base.tensors[f"{module}.weight"]
    a, b = (tensor.to(dtype).to(torch.float32) for tensor in (part.a, part.b))
    norms: list[Tensor] = []
    rows = TensorFile(stored.file).tensor(stored.info)
    if scheme is not None:
        rows = scheme.dequantized(rows.to(dtype))
    for start in range(0, b.shape[0], _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, b.shape[0])
        weight = rows[start:stop].to(dtype).to(torch.float32)
        weight = weight + part.scaling * (b[start:stop] @ a)
        norms.append(torch.linalg.norm(weight, dim=1))
    return torch.cat(norms)
