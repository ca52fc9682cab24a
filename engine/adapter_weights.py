"""One adapter in host memory, fused and cast as the model runs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapter_store.base_model import BaseModel


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter's tensors, ready for a slot."""

    digest: str
    rank: int
    """The largest over its modules."""
    projections: Mapping[Any, Any]
    nbytes: int


def load_adapter(
    folder: Path, digest: str, base: BaseModel, *, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Read, re-validate, fuse and cast an adapter; raises `AdapterUnavailable`."""
    raise NotImplementedError
