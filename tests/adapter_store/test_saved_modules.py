"""Full weights: copies of the base's, and those that `modules_to_save` brings."""

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from adapter_store.base_model import BaseModel, read_base_model
from adapter_store.peft_config import MAX_PATTERNS, parse_config
from adapter_store.saved_modules import take_saved
from tests.support.adapter_files import (
    PREFIX,
    Q0,
    edit_adapter_config,
    edit_tensors,
    inspect_folder,
    make_adapter,
    refusal,
    set_tensor,
)
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model


def base_weight(base_dir: Path, name: str) -> torch.Tensor:
    return load_file(base_dir / "model.safetensors")[name]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (f"{PREFIX}lm_head.weight", "lm_head.weight"),
        (f"{PREFIX}lm_head.base_layer.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        (f"{PREFIX}model.embed_tokens.weight", "model.embed_tokens.weight"),
        (f"{PREFIX}model.norm.weight", "model.norm.weight"),
        (f"{Q0}.base_layer.weight", "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_full_weight_is_ignored_if_it_is_the_bases_and_refused_if_it_was_trained(
    key: str, name: str, adapter: Path, base: BaseModel, base_dir: Path
) -> None:
    weight = base_weight(base_dir, name)
    set_tensor(adapter, key, weight)
    report = inspect_folder(adapter, base).report
    assert [(ignored.count, ignored.sample) for ignored in report.ignored] == [(1, key)]
    assert report.num_modules == 4
    trained = weight.clone()
    trained.view(-1)[-1] += 1e-3
    for changed in (trained, torch.cat([weight, weight]), weight.to(torch.bfloat16)):
        set_tensor(adapter, key, changed)
        error = refusal(adapter, base)
        assert (error.code, error.field) == ("full_weight", key)


def test_a_copy_of_a_half_precision_base_in_float32_is_the_same_weight(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "half",
        "smollm",
        dtype=torch.bfloat16,
        hidden_size=36,
        intermediate_size=48,
        num_hidden_layers=1,
    )
    adapter = make_tiny_adapter(tmp_path / "adapter", folder)
    weight = base_weight(folder, "model.embed_tokens.weight")
    set_tensor(adapter, f"{PREFIX}lm_head.weight", weight.float())
    assert inspect_folder(adapter, read_base_model(folder)).report.ignored[0].count == 1


def test_modules_to_save_is_decided_by_the_tensors(
    adapter: Path, base: BaseModel, base_dir: Path
) -> None:
    edit_adapter_config(adapter, modules_to_save=[])
    assert inspect_folder(adapter, base).report.warnings == []
    edit_adapter_config(adapter, modules_to_save=["lm_head"])
    inspected = inspect_folder(adapter, base)
    assert any("lm_head" in warning for warning in inspected.report.warnings)
    assert (inspected.saved, inspected.report.full_weights) == ({}, [])
    key, weight = f"{PREFIX}lm_head.weight", base_weight(base_dir, "lm_head.weight")
    set_tensor(adapter, key, weight)
    inspected = inspect_folder(adapter, base)
    assert (inspected.saved, inspected.report.ignored[0].sample) == ({}, key)
    set_tensor(adapter, key, weight + 1)
    inspected = inspect_folder(adapter, base)
    assert inspected.saved == {"lm_head": key}
    assert inspected.report.features == ["modules_to_save"]
    assert (inspected.report.warnings, inspected.report.ignored) == ([], [])


def test_own_norms_are_bound_as_peft_saves_them(
    tmp_path: Path, base_dir: Path, base: BaseModel
) -> None:
    folder = make_adapter(tmp_path, base_dir, modules_to_save=["norm", "lm_head"])
    inspected = inspect_folder(folder, base)
    # PEFT's names match in the middle of a word: `norm` is every norm.
    layers = range(base.num_layers)
    kinds = ("input_layernorm", "post_attention_layernorm")
    wanted = {"model.norm", "lm_head"}
    wanted |= {f"model.layers.{n}.{kind}" for n in layers for kind in kinds}
    assert inspected.saved == {module: f"{PREFIX}{module}.weight" for module in wanted}
    last = base.num_layers - 1
    assert inspected.report.full_weights == [
        f"input_layernorm of 0-{last}",
        "lm_head",
        "norm",
        f"post_attention_layernorm of 0-{last}",
    ]
    assert not inspected.report.no_op
    gone = f"{PREFIX}model.layers.0.input_layernorm.weight"
    edit_tensors(folder, lambda t: {k: v for k, v in t.items() if k != gone})
    error = refusal(folder, base)
    assert (error.code, error.field) == ("missing_tensor", "model.layers.0.input_layernorm")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("o_proj", "model.layers.0.self_attn.o_proj"),
        ("mlp", "model.layers.0.mlp.up_proj"),
        ("lm_head", "model.norm"),
        ("layers.0.input_layernorm", "model.layers.1.input_layernorm"),
    ],
)
def test_other_modules_are_not_saved_ones(
    name: str, module: str, adapter: Path, base: BaseModel, base_dir: Path
) -> None:
    edit_adapter_config(adapter, modules_to_save=[name, ""])
    key = f"{PREFIX}{module}.weight"
    set_tensor(adapter, key, base_weight(base_dir, f"{module}.weight") + 1)
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("full_weight", key)


def test_names_of_saved_modules_are_not_compared_with_every_key(base: BaseModel) -> None:
    # A file may have thousands of either, and the engine reads it beside its steps.
    copies = {f"{head}{name}": name for name in base.tensors for head in ("", "model.", PREFIX)}

    def num_calls(num_names: int) -> int:
        config = msgspec.structs.replace(
            parse_config(b'{"peft_type": "LORA", "target_modules": ["q_proj"]}'),
            modules_to_save=tuple(f"none{number}" for number in range(num_names)),
        )
        calls: list[str] = []
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            assert take_saved(config, dict(copies), base, ()) == {}
        finally:
            sys.setprofile(None)
        return len(calls)

    assert num_calls(MAX_PATTERNS) < 2 * num_calls(1)


def test_an_own_weight_must_fit_and_be_the_only_one(
    adapter: Path, base: BaseModel, base_dir: Path
) -> None:
    edit_adapter_config(adapter, modules_to_save=["lm_head", "model.norm"])
    key, weight = f"{PREFIX}lm_head.weight", base_weight(base_dir, "lm_head.weight") + 1
    set_tensor(adapter, key, torch.cat([weight, weight[:2]]))
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("shape_mismatch", key)
    set_tensor(adapter, key, weight)
    vector = base_weight(base_dir, "model.norm.weight") + 1
    set_tensor(adapter, f"{PREFIX}model.norm.weight", vector.double())
    assert refusal(adapter, base).code == "unsupported_dtype"
    set_tensor(adapter, f"{PREFIX}model.norm.weight", vector)
    assert inspect_folder(adapter, base).saved.keys() == {"lm_head", "model.norm"}
    set_tensor(adapter, "model.norm.weight", vector)
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("unsupported_tensor", "model.norm.weight")


def test_an_own_end_is_not_tied_and_has_no_lora(
    tmp_path: Path, base_dir: Path, base: BaseModel
) -> None:
    folder = make_adapter(tmp_path, base_dir, modules_to_save=["lm_head"])
    edit_adapter_config(folder, ensure_weight_tying=True)
    error = refusal(folder, base)
    assert (error.code, error.field) == ("unsupported_field", "ensure_weight_tying")
    both = make_adapter(tmp_path / "both", base_dir, target_modules=["lm_head"])
    # Matches the end of the name, but not the rule that takes saved modules out of the targets.
    edit_adapter_config(both, modules_to_save=["head"])
    key = f"{PREFIX}lm_head.weight"
    set_tensor(both, key, base_weight(base_dir, "lm_head.weight") + 1)
    error = refusal(both, base)
    assert (error.code, error.field) == ("unsupported_tensor", key)


def test_own_matrices_are_bounded_and_norms_are_not(
    tmp_path: Path, base_dir: Path, base: BaseModel
) -> None:
    folder = make_adapter(tmp_path, base_dir, modules_to_save=["embed_tokens", "lm_head", "norm"])
    ends = [f"{PREFIX}{name}.weight" for name in ("model.embed_tokens", "lm_head")]
    values = 2 * base.vocab_size * base.hidden_size

    def num_saved(most: int) -> int:
        return len(inspect_folder(folder, base, max_full_values=most).saved)

    assert num_saved(values) == 3 + 2 * base.num_layers
    error = refusal(folder, base, max_full_values=values - 1)
    assert error.code == "full_weight_too_large"
    assert error.field in ends and str(values) in error.message
    edit_adapter_config(folder, modules_to_save=["norm"])
    edit_tensors(folder, lambda t: {k: v for k, v in t.items() if k not in ends})
    assert num_saved(0) == 1 + 2 * base.num_layers
