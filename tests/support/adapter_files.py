"""Change the two files of a saved adapter, as a hostile or an unusual trainer would have."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.base_model import BaseModel
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_format import InspectedAdapter, inspect_adapter
from tests.support.tiny_models import make_tiny_adapter

PREFIX = "base_model.model."
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
V1 = f"{PREFIX}model.layers.1.self_attn.v_proj"

Tensors = dict[str, torch.Tensor]


def copy_adapter(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def edit_adapter_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load_tensors(folder: Path) -> Tensors:
    return load_file(folder / "adapter_model.safetensors")


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_tensors(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def rename_keys(folder: Path, rename: Callable[[str], str]) -> None:
    edit_tensors(folder, lambda tensors: {rename(key): value for key, value in tensors.items()})


def set_tensor(folder: Path, key: str, value: torch.Tensor) -> None:
    edit_tensors(folder, lambda tensors: tensors | {key: value})


def inspect_folder(
    folder: Path, base: BaseModel, *, max_rank: int = 64, max_full_values: int | None = None
) -> InspectedAdapter:
    return inspect_adapter(
        (folder / "adapter_config.json").read_bytes(),
        folder / "adapter_model.safetensors",
        base,
        max_rank=max_rank,
        max_full_values=max_full_values,
    )


def refusal(folder: Path, base: BaseModel, **kwargs: Any) -> AdapterFormatError:
    with pytest.raises(AdapterFormatError) as caught:
        inspect_folder(folder, base, **kwargs)
    return caught.value


def make_adapter(tmp_path: Path, base_dir: Path, **config: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make_tiny_adapter(tmp_path / "featured", base_dir, **config)
