import hashlib
import json
from pathlib import Path

import pytest
import torch

from adapter_store.base_model import BaseModel
from adapter_store.digest import hash_files
from adapter_store.errors import AdapterFormatError
from tests.support.adapter_files import (
    edit_adapter_config,
    inspect_folder,
    load_tensors,
    set_tensor,
)


def digest_of(folder: Path) -> str:
    config = (folder / "adapter_config.json").read_bytes()
    return hash_files(config, folder / "adapter_model.safetensors")


def test_digest_is_over_the_version_the_canonical_config_and_the_file(
    adapter: Path, base: BaseModel
) -> None:
    config = {
        "alpha_pattern": [],
        "exclude_modules": [],
        "layers_pattern": [],
        "layers_to_transform": [],
        "lora_alpha": 16.0,
        "modules_to_save": [],
        "r": 4,
        "rank_pattern": [],
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": False,
    }
    parts = (
        b"loraplex-1",
        json.dumps(config, sort_keys=True, separators=(",", ":")).encode(),
        (adapter / "adapter_model.safetensors").read_bytes(),
    )
    expected = hashlib.sha256(b"".join(len(p).to_bytes(8, "little") + p for p in parts))
    assert digest_of(adapter) == expected.hexdigest()
    assert digest_of(adapter) == inspect_folder(adapter, base).digest


def test_digest_does_not_follow_what_changes_no_result(adapter: Path) -> None:
    before = digest_of(adapter)
    edit_adapter_config(
        adapter,
        target_modules=["v_proj", "q_proj"],
        lora_dropout=0.5,
        lora_alpha=16.0,
        base_model_name_or_path="elsewhere",
        rank_pattern=None,
        peft_version="0.19.0",
    )
    assert digest_of(adapter) == before


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 17},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 1}},
        {"target_modules": ".*(q|v)_proj"},
    ],
)
def test_digest_follows_the_config(change: dict[str, object], adapter: Path) -> None:
    before = digest_of(adapter)
    edit_adapter_config(adapter, **change)
    assert digest_of(adapter) != before


def test_digest_follows_every_byte_of_the_weights(adapter: Path) -> None:
    before = digest_of(adapter)
    key, tensor = next(iter(load_tensors(adapter).items()))
    tensor.view(torch.int32).view(-1)[-1] ^= 1
    set_tensor(adapter, key, tensor)
    assert digest_of(adapter) != before


def test_a_config_that_cannot_be_parsed_has_no_digest(adapter: Path) -> None:
    with pytest.raises(AdapterFormatError):
        hash_files(b"{}", adapter / "adapter_model.safetensors")
