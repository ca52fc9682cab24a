"""What of an adapter is bound to the base, and with which shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.base_model import BaseModel, read_base_model
from tests.support.adapter_files import (
    PREFIX,
    Q0,
    V1,
    edit_adapter_config,
    edit_tensors,
    inspect_folder,
    make_adapter,
    refusal,
    rename_keys,
    set_tensor,
)
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

EMBED = f"{PREFIX}model.embed_tokens"


@pytest.mark.parametrize(
    ("config", "features"),
    [
        ({"target_modules": ["embed_tokens", "lm_head"]}, ["embedding", "lm_head"]),
        ({"use_dora": True}, ["dora"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({}, []),
    ],
)
def test_the_report_names_what_is_beside_lora_of_the_layers(
    config: dict[str, Any], features: list[str], tmp_path: Path, base_dir: Path, base: BaseModel
) -> None:
    inspected = inspect_folder(make_adapter(tmp_path, base_dir, **config), base)
    assert inspected.report.features == features
    assert inspected.config.items() >= {k: v for k, v in config.items() if v is True}.items()
    if "lm_head" in features:
        assert [(m.module, m.layers, m.count) for m in inspected.report.modules] == [
            ("embed_tokens", "", 1),
            ("lm_head", "", 1),
        ]


@pytest.mark.parametrize("kind", ["all", "lora_only"])
def test_trained_biases_replace_the_bases(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "biased", "qwen2", num_hidden_layers=1)
    base = read_base_model(folder)
    targets = ["q_proj", "o_proj"]
    adapter = make_adapter(tmp_path, folder, bias=kind, target_modules=targets)
    inspected = inspect_folder(adapter, base)
    names = "qkv" if kind == "all" else "q"
    wanted = {f"model.layers.0.self_attn.{name}_proj" for name in names}
    assert inspected.biases.keys() == wanted
    assert inspected.report.features == ["bias"]
    assert inspected.report.ignored == []
    edit_adapter_config(adapter, bias="none")
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("full_weight", min(inspected.biases.values()))


def test_a_bias_that_peft_would_not_find_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "biased", "qwen2", num_hidden_layers=1)
    adapter = make_adapter(tmp_path, folder, bias="lora_only", target_modules=["q_proj"])
    rename_keys(adapter, lambda key: key.replace(".base_layer.bias", ".bias"))
    error = refusal(adapter, read_base_model(folder))
    assert (error.code, error.field) == ("untargeted_tensor", f"{Q0}.bias")


@pytest.mark.parametrize(
    ("config", "gone", "missing"),
    [
        ({"use_dora": True}, f"{Q0}.lora_magnitude_vector", "lora_magnitude_vector"),
        ({"lora_bias": True}, f"{Q0}.lora_B.bias", "bias of lora_B"),
        (
            {"target_modules": ["embed_tokens"]},
            f"{EMBED}.lora_embedding_A",
            "lora_embedding_A",
        ),
    ],
)
def test_a_part_that_the_config_asks_for_must_be_there(
    config: dict[str, Any], gone: str, missing: str, tmp_path: Path, base_dir: Path, base: BaseModel
) -> None:
    folder = make_adapter(tmp_path, base_dir, **config)
    edit_tensors(folder, lambda t: {k: v for k, v in t.items() if k != gone})
    error = refusal(folder, base)
    assert error.code == "missing_tensor"
    assert missing in error.message


@pytest.mark.parametrize(
    ("config", "key", "size"),
    [
        ({"use_dora": True}, f"{Q0}.lora_magnitude_vector", 31),
        ({"lora_bias": True}, f"{Q0}.lora_B.bias", 33),
    ],
)
def test_a_vector_of_another_size_is_refused(
    config: dict[str, Any], key: str, size: int, tmp_path: Path, base_dir: Path, base: BaseModel
) -> None:
    folder = make_adapter(tmp_path, base_dir, **config)
    set_tensor(folder, key, torch.ones(size))
    error = refusal(folder, base)
    assert (error.code, error.field) == ("shape_mismatch", key)


@pytest.mark.parametrize(
    ("field", "target"),
    [
        ("ensure_weight_tying", "embed_tokens"),
        ("ensure_weight_tying", "lm_head"),
        ("use_dora", "lm_head"),
        ("lora_bias", "embed_tokens"),
    ],
)
def test_what_the_ends_of_the_model_cannot_have_is_refused_by_the_fields_name(
    field: str, target: str, tmp_path: Path, base_dir: Path, base: BaseModel
) -> None:
    folder = make_adapter(tmp_path, base_dir, target_modules=[target])
    edit_adapter_config(folder, **{field: True})
    error = refusal(folder, base)
    assert (error.code, error.field) == ("unsupported_field", field)
    assert target in error.message


# Pairs and shapes


@pytest.mark.parametrize("side", ["A", "B"])
def test_one_matrix_without_the_other_is_refused(side: str, adapter: Path, base: BaseModel) -> None:
    gone = f"{Q0}.lora_{side}.weight"
    edit_tensors(adapter, lambda t: {k: v for k, v in t.items() if k != gone})
    error = refusal(adapter, base)
    assert error.code == "missing_tensor"
    assert error.field == f"{Q0}.lora_{'B' if side == 'A' else 'A'}.weight"


@pytest.mark.parametrize(
    ("key", "shape", "code"),
    [
        (f"{Q0}.lora_A.weight", (4, 33), "shape_mismatch"),
        (f"{Q0}.lora_A.weight", (32, 4), "shape_mismatch"),
        (f"{Q0}.lora_A.weight", (5, 32), "rank_mismatch"),
        (f"{Q0}.lora_A.weight", (0, 32), "rank_mismatch"),
        (f"{Q0}.lora_A.weight", (0,), "shape_mismatch"),
        (f"{Q0}.lora_A.weight", (), "shape_mismatch"),
        (f"{Q0}.lora_A.weight", (1, 4, 32), "shape_mismatch"),
        (f"{Q0}.lora_B.weight", (31, 4), "shape_mismatch"),
        (f"{Q0}.lora_B.weight", (32, 3), "rank_mismatch"),
        (f"{Q0}.lora_B.weight", (32, 0), "rank_mismatch"),
    ],
)
def test_a_wrong_shape_is_refused_by_the_tensors_name(
    key: str, shape: tuple[int, ...], code: str, adapter: Path, base: BaseModel
) -> None:
    set_tensor(adapter, key, torch.ones(shape))
    error = refusal(adapter, base)
    assert (error.code, error.field) == (code, key)


def test_an_adapter_for_a_wider_base_is_refused(base: BaseModel, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "wide", hidden_size=64, num_hidden_layers=2)
    adapter = make_tiny_adapter(tmp_path / "adapter", other)
    error = refusal(adapter, base)
    assert error.code == "shape_mismatch"
    assert "32 → 32" in error.message


def test_an_adapter_for_a_deeper_base_is_refused(base: BaseModel, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "deep", hidden_size=32, num_hidden_layers=3)
    error = refusal(make_tiny_adapter(tmp_path / "adapter", other), base)
    assert error.code == "foreign_tensor"
    assert "layers.2" in error.message


def test_the_rank_cap_is_for_the_largest_module(
    base_dir: Path, base: BaseModel, tmp_path: Path
) -> None:
    adapter = make_tiny_adapter(tmp_path / "a", base_dir, r=4, rank_pattern={"1.*v_proj": 12})
    assert inspect_folder(adapter, base, max_rank=12).report.rank == 12
    error = refusal(adapter, base, max_rank=11)
    assert (error.code, error.field) == ("rank_too_large", "rank_pattern")
    assert "layers.1.self_attn.v_proj" in error.message
    smaller = {"self_attn.*": 2}
    adapter = make_tiny_adapter(tmp_path / "b", base_dir, r=64, rank_pattern=smaller)
    assert inspect_folder(adapter, base, max_rank=2).report.rank == 2


def test_modules_that_peft_would_start_at_random_are_refused(
    adapter: Path, base: BaseModel
) -> None:
    edit_tensors(adapter, lambda t: {k: v for k, v in t.items() if V1 not in k})
    assert len(inspect_folder(adapter, base).bindings) == 3
    edit_adapter_config(adapter, init_lora_weights=False)
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("missing_tensor", V1.removeprefix(PREFIX))
