"""One adapter in host memory, fused and rounded as the model runs it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from adapter_store.base_model import BaseModel
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_format import Binding, inspect_adapter
from engine.errors import AdapterUnavailable
from engine.models.projections import (
    SPLIT_PROJECTIONS,
    LayerProjections,
    ProjectionKey,
    ProjectionSpec,
    iter_projections,
    module_path,
)
from lora_kernels import CpuKernels, LoraSlice
from lora_kernels.cpu_kernels import TORCH_KERNELS, CpuWeights

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter's tensors, ready for a slot."""

    digest: str
    rank: int
    """The largest over its modules."""
    projections: Mapping[ProjectionKey, CpuWeights]
    """Only those that the adapter has weights for."""
    nbytes: int


def load_adapter(
    folder: Path,
    digest: str,
    base: BaseModel,
    *,
    max_rank: int,
    dtype: torch.dtype,
    projections: LayerProjections = SPLIT_PROJECTIONS,
    kernels: CpuKernels = TORCH_KERNELS,
) -> AdapterWeights:
    """Read an adapter's folder; safe on any thread.

    The files are checked as at their upload, and must hash to `digest`, before a tensor is used.
    Values are rounded to `dtype`, and fused into `projections` for `kernels`: all three the
    model's. Raises AdapterUnavailable.
    """
    weights_file = folder / WEIGHTS_FILE
    try:
        config = (folder / CONFIG_FILE).read_bytes()
        inspected = inspect_adapter(config, weights_file, base, max_rank=max_rank)
        if inspected.digest != digest:
            raise AdapterUnavailable(digest, f"its files hash to {inspected.digest[:12]}")
        with safe_open(weights_file, "pt") as file:
            slots = iter_projections(base.num_layers, projections)
            fused = _fuse(inspected.bindings, file, slots, dtype, kernels)
    except AdapterFormatError as error:
        raise AdapterUnavailable(digest, f"{error.code}: {error.message}") from error
    except (OSError, SafetensorError) as error:
        raise AdapterUnavailable(digest, f"its files cannot be read: {error}") from error
    return AdapterWeights(
        digest=digest,
        rank=max(binding.rank for binding in inspected.bindings),
        projections=fused,
        nbytes=sum(weights.nbytes for weights in fused.values()),
    )


def _fuse(
    bindings: tuple[Binding, ...],
    file: Any,
    slots: Iterable[tuple[ProjectionKey, ProjectionSpec]],
    dtype: torch.dtype,
    kernels: CpuKernels,
) -> dict[ProjectionKey, CpuWeights]:
    bound = {binding.module: binding for binding in bindings}
    projections: dict[ProjectionKey, CpuWeights] = {}
    for key, spec in slots:
        members = [bound.pop(module_path(key.layer, member), None) for member in spec.members]
        if any(members):
            slices = [None if member is None else _read(member, file) for member in members]
            projections[key] = kernels.fuse(slices, dtype)
    if bound:
        raise AdapterFormatError(
            "foreign_tensor", f"the model has no place for '{next(iter(bound))}'"
        )
    return projections


def _read(binding: Binding, file: Any) -> LoraSlice:
    a, b = file.get_tensor(binding.a_key), file.get_tensor(binding.b_key)
    return LoraSlice(a, b, binding.scaling)
