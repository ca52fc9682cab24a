import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapter_store.base_model import BaseModel, LinearShape, read_base_model
from adapter_store.errors import BaseModelError
from tests.support.tiny_models import FAMILIES, FAMILY_CONFIGS, edit_config, make_tiny_model

PHI3_ROPE = FAMILY_CONFIGS["phi3"]["rope_parameters"]


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_are_the_models_own_except_the_output_layer(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", family)
    base = read_base_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = {
        name: LinearShape(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert base.linears == expected
    assert {"model.norm", "model"} <= base.other_modules
    assert set(base.ends) == {"lm_head", "model.embed_tokens"}
    assert base.tensors["lm_head.weight"].info.shape == (base.vocab_size, base.hidden_size)
    assert (base.num_layers, base.name) == (model.config.num_hidden_layers, "model")


def test_shards_make_no_difference(tmp_path: Path, base: BaseModel) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    folder = make_tiny_model(tmp_path / "tiny-llama", max_shard_size="20KB", **sizes)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    sharded = read_base_model(folder)
    assert sharded.linears == base.linears
    assert sharded.fingerprint == base.fingerprint


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_fingerprint_follows_the_weights(name: str, base_dir: Path, tmp_path: Path) -> None:
    folder = _copy(base_dir, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] += 1
    save_file(tensors, folder / "model.safetensors")
    assert read_base_model(folder).fingerprint != read_base_model(base_dir).fingerprint


def test_fingerprint_follows_the_architecture_but_not_the_way_it_is_written(
    base_dir: Path, tmp_path: Path
) -> None:
    folder = _copy(base_dir, tmp_path)
    fingerprint = read_base_model(base_dir).fingerprint
    edit_config(folder, use_cache=False, transformers_version="4.40.0", attention_bias=None)
    assert read_base_model(folder).fingerprint == fingerprint
    edit_config(folder, rms_norm_eps=0.1)
    assert read_base_model(folder).fingerprint != fingerprint


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": 3.0}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 24}),
        ("phi3", {"rope_parameters": PHI3_ROPE | {"partial_rotary_factor": 0.5}}),
        ("phi3", {"rope_parameters": PHI3_ROPE | {"long_factor": [1.0] * 6}}),
        ("phi3", {"original_max_position_embeddings": 128}),
    ],
)
def test_fingerprint_follows_what_only_some_families_have(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family)
    before = read_base_model(folder).fingerprint
    edit_config(folder, **changes)
    assert read_base_model(folder).fingerprint != before


def test_fingerprint_of_phi3_is_the_same_as_older_transformers_wrote_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "phi3")
    before = read_base_model(folder).fingerprint
    old = {key: PHI3_ROPE[key] for key in ("short_factor", "long_factor")}
    edit_config(
        folder,
        rope_parameters=None,
        rope_scaling=old | {"type": "longrope"},
        rope_theta=PHI3_ROPE["rope_theta"],
        partial_rotary_factor=PHI3_ROPE["partial_rotary_factor"],
    )
    assert read_base_model(folder).fingerprint == before


def test_a_folder_that_is_no_base_model_is_refused(base_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"config\.json"):
        read_base_model(tmp_path)
    folder = _copy(base_dir, tmp_path)
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(BaseModelError, match="2 layers"):
        read_base_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BaseModelError, match="neither"):
        read_base_model(folder)
    index = {"weight_map": {"model.norm.weight": "../tiny-llama/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BaseModelError, match="not there"):
        read_base_model(folder)


def test_quantized_weights_are_refused(base_dir: Path, tmp_path: Path) -> None:
    folder = _copy(base_dir, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BaseModelError, match=r"up_proj\.weight' is I8"):
        read_base_model(folder)


def _copy(base_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((base_dir / name).read_bytes())
    return folder
