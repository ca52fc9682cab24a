"""The keys of an adapter file: how they are nested, and which of them are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.base_model import BaseModel
from tests.support.adapter_files import (
    PREFIX,
    Q0,
    V1,
    edit_adapter_config,
    inspect_folder,
    load_tensors,
    refusal,
    rename_keys,
    set_tensor,
)


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix(PREFIX),
        lambda key: key.replace("model.layers", "model.model.layers"),
        lambda key: key.replace("model.model.layers", "model.layers"),
        lambda key: key.removeprefix(PREFIX + "model."),
        lambda key: key.replace("model.layers", "model.language_model.layers"),
        lambda key: key.replace("model.layers", "language_model.model.layers"),
        lambda key: key.replace("_A.", "_A.default.").replace("_B.", "_B.default."),
        lambda key: key.replace("_A.", "_A.mine.").replace("_B.", "_B.mine.").removeprefix(PREFIX),
    ],
    ids=[
        "no prefix",
        "one level too many",
        "one level missing",
        "bare",
        "language_model",
        "language_model outside",
        "adapter name",
        "adapter name, no prefix",
    ],
)
def test_another_nesting_binds_the_same_matrices(
    rename: Callable[[str], str], adapter: Path, base: BaseModel
) -> None:
    expected = {
        b.module: (
            b.rank,
            b.scaling,
            load_tensors(adapter)[b.a_key],
            load_tensors(adapter)[b.b_key],
        )
        for b in inspect_folder(adapter, base).bindings
    }
    rename_keys(adapter, rename)
    inspected = inspect_folder(adapter, base)
    tensors = load_tensors(adapter)
    assert len(inspected.bindings) == len(expected)
    for binding in inspected.bindings:
        rank, scaling, a, b = expected[binding.module]
        assert (binding.rank, binding.scaling) == (rank, scaling)
        assert torch.equal(tensors[binding.a_key], a)
        assert torch.equal(tensors[binding.b_key], b)
    assert any("nested" in warning for warning in inspected.report.warnings)


def test_patterns_are_read_with_the_paths_of_the_model_that_was_trained(
    adapter: Path, base: BaseModel
) -> None:
    rename_keys(adapter, lambda key: key.replace("model.layers", "model.language_model.layers"))
    edit_adapter_config(
        adapter,
        target_modules=r".*language_model.*\.(q|v)_proj",
        alpha_pattern={r"model\.language_model\.layers\.1\..*": 4},
    )
    scalings = {b.module[:14]: b.scaling for b in inspect_folder(adapter, base).bindings}
    assert scalings == {"model.layers.0": 4.0, "model.layers.1": 1.0}


def test_patterns_that_read_differently_in_another_nesting_are_refused(
    adapter: Path, base: BaseModel
) -> None:
    rename_keys(adapter, lambda key: key.replace("model.layers", "model.language_model.layers"))
    edit_adapter_config(
        adapter, alpha_pattern={r"^model\.language_model.*": 4, r"^model\.layers.*": 2}
    )
    error = refusal(adapter, base)
    assert error.code == "ambiguous_nesting"


def test_two_nestings_in_one_file_are_refused(adapter: Path, base: BaseModel) -> None:
    rename_keys(adapter, lambda k: k.replace(V1, V1.removeprefix(PREFIX)))
    error = refusal(adapter, base)
    assert error.code == "ambiguous_nesting"
    assert V1.removeprefix(PREFIX) in error.message


@pytest.mark.parametrize(
    "key",
    [
        f"{PREFIX}model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}visual.blocks.0.attn.qkv.lora_A.weight",
        f"{PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}model.layers.0.self_attn.w_pack.lora_A.weight",
        f"{PREFIX}model.layers.00.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}lm_head.lora_embedding_A",
        f"{PREFIX}model.embed_tokens.lora_A.weight",
        f"{PREFIX}model.norm.lora_A.weight",
        f"{PREFIX}classifier.weight",
        f"{PREFIX}score.weight",
        "something",
        "",
    ],
)
def test_one_foreign_key_beside_good_ones_is_refused_by_name(
    key: str, adapter: Path, base: BaseModel
) -> None:
    set_tensor(adapter, key, torch.ones(4, 32))
    error = refusal(adapter, base)
    assert error.code in ("foreign_tensor", "unsupported_tensor")
    assert error.field == key
    assert key in error.message


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (f"{Q0}.lora_magnitude_vector", "DoRA"),
        (f"{Q0}.lora_B.bias", "lora_bias"),
        (f"{Q0}.lora_diag", "lora_A"),
        (f"{PREFIX}lm_head.modules_to_save.weight", "fully trained"),
    ],
)
def test_tensors_of_other_methods_are_refused_whatever_the_config_says(
    key: str, reason: str, adapter: Path, base: BaseModel
) -> None:
    set_tensor(adapter, key, torch.ones(4))
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("unsupported_tensor", key)
    assert reason in error.message


def test_a_tensor_that_the_config_does_not_target_is_refused(
    adapter: Path, base: BaseModel
) -> None:
    edit_adapter_config(adapter, target_modules=["q_proj"])
    error = refusal(adapter, base)
    assert error.code == "untargeted_tensor"
    assert "v_proj" in (error.field or "")


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "norm"], ".*_proj|model.layers.0"])
def test_targets_outside_the_linears_of_the_layers_are_refused(
    targets: Any, adapter: Path, base: BaseModel
) -> None:
    edit_adapter_config(adapter, target_modules=targets)
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("unsupported_module", "target_modules")
