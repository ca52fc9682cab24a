"""What is bound, with which rank and scaling, against PEFT's own layers on the same base."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from adapter_store.base_model import BaseModel
from adapter_store.errors import AdapterFormatError
from tests.support.adapter_files import edit_adapter_config, inspect_folder, load_tensors
from tests.support.tiny_models import make_tiny_adapter

ALL_KINDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "rslora": {"use_rslora": True, "r": 16, "lora_alpha": 16},
    "rslora with rank pattern": {
        "use_rslora": True,
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL_KINDS,
        "rank_pattern": {"q_proj": 16, "mlp.up_proj": 4, r"layers\.1\.self_attn\.[ko]_proj": 2},
    },
    "patterns with plain keys": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL_KINDS,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 12},
        "alpha_pattern": {"v_proj": 5, "self_attn.q_proj": 3},
    },
    "patterns with regex keys": {
        "target_modules": ALL_KINDS,
        "rank_pattern": {r"^model\.layers\.0\..*": 3, r".*1\.mlp\.(up|down)_proj": 6},
        "alpha_pattern": {r"model\.layers\.\d+\.mlp\.(gate|up)_proj": 32, ".*": 4},
    },
    "layers_to_transform": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "layers_pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "regex targets": {"target_modules": r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj"},
    "lookahead targets": {"target_modules": r"(?!.*layers\.0).*_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "all-linear with exclusion": {
        "target_modules": "all-linear",
        "exclude_modules": ["k_proj", "mlp.gate_proj"],
    },
    "exclusion by regex": {
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": r".*\.0\..*v_proj",
    },
    "many full paths": {
        "target_modules": [
            f"model.layers.{layer}.{'self_attn' if kind[0] in 'qkvo' else 'mlp'}.{kind}"
            for layer in (0, 1)
            for kind in ALL_KINDS
        ],
    },
    "only the last of a fused group": {"target_modules": ["v_proj", "up_proj"]},
}


def load_with_peft(base_dir: Path, folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.24 has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(model, folder)


@pytest.mark.parametrize("name", ADAPTERS)
def test_ranks_and_scalings_are_pefts(
    name: str, base_dir: Path, base: BaseModel, tmp_path: Path
) -> None:
    folder = make_tiny_adapter(tmp_path / "adapter", base_dir, **ADAPTERS[name])
    if name.startswith("all-linear"):
        # PEFT saves the modules it found; a config written by hand keeps the short word.
        edit_adapter_config(folder, target_modules="all-linear")
    inspected = inspect_folder(folder, base)
    tensors = load_tensors(folder)
    layers = {
        path.removeprefix("base_model.model."): module
        for path, module in load_with_peft(base_dir, folder).named_modules()
        if isinstance(module, LoraLayer)
    }
    bindings = {binding.module: binding for binding in inspected.bindings}
    assert bindings.keys() == layers.keys()
    for path, layer in layers.items():
        binding = bindings[path]
        assert binding.rank == layer.r["default"], path
        assert binding.scaling == layer.scaling["default"], path
        assert torch.equal(tensors[binding.a_key], layer.lora_A["default"].weight), path
        assert torch.equal(tensors[binding.b_key], layer.lora_B["default"].weight), path
    assert inspected.report.num_modules == sum(group.count for group in inspected.report.modules)
    assert inspected.report.rank == max(layer.r["default"] for layer in layers.values())
    assert not inspected.report.no_op
    assert inspected.report.warnings == []


def test_rslora_of_sixteen_over_sixteen_scales_by_four(
    base_dir: Path, base: BaseModel, tmp_path: Path
) -> None:
    folder = make_tiny_adapter(tmp_path / "a", base_dir, use_rslora=True, r=16, lora_alpha=16)
    assert inspect_folder(folder, base).report.scalings == [16 / math.sqrt(16)] == [4.0]


def test_a_targeted_module_without_tensors_adds_nothing_in_peft_either(
    base_dir: Path, base: BaseModel, saved_adapter: Path, tmp_path: Path
) -> None:
    folder = make_tiny_adapter(tmp_path / "adapter", base_dir, layers_to_transform=[1])
    edit_adapter_config(folder, layers_to_transform=None)
    inspected = inspect_folder(folder, base)
    assert {binding.module.split(".")[2] for binding in inspected.bindings} == {"1"}
    assert any("2 modules without tensors" in warning for warning in inspected.report.warnings)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        model = load_with_peft(base_dir, folder)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert isinstance(layer, LoraLayer)
    assert not layer.lora_B["default"].weight.any()


def test_all_linear_is_every_linear_but_the_output_layer(
    base_dir: Path, base: BaseModel, tmp_path: Path
) -> None:
    folder = make_tiny_adapter(tmp_path / "adapter", base_dir, target_modules="all-linear")
    modules = {binding.module for binding in inspect_folder(folder, base).bindings}
    assert modules == base.linears.keys()


def test_patterns_that_overlap_are_read_in_the_order_of_the_file(
    base_dir: Path, base: BaseModel, tmp_path: Path
) -> None:
    """PEFT sorts the patterns when it saves, and then cannot load what it saved."""
    patterns = {"q_proj": 2, r".*\.self_attn\..*": 4}
    folder = make_tiny_adapter(tmp_path / "adapter", base_dir, rank_pattern=patterns)
    with pytest.raises(AdapterFormatError) as caught:
        inspect_folder(folder, base)
    assert caught.value.code == "rank_mismatch"
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_with_peft(base_dir, folder)
    edit_adapter_config(folder, rank_pattern=patterns)
    ranks = {b.module[-6:]: b.rank for b in inspect_folder(folder, base).bindings}
    assert ranks == {"q_proj": 2, "v_proj": 4}
    load_with_peft(base_dir, folder)
