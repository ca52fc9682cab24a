"""Adapters of bases whose checkpoints fuse q/k/v and gate/up themselves, as Phi-3's do."""

from pathlib import Path

import pytest

from adapter_store.base_model import BaseModel, read_base_model
from adapter_store.errors import AdapterFormatError
from tests.support.adapter_files import edit_tensors, inspect_folder
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

B_KEY = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"


@pytest.fixture(scope="module")
def phi3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("phi3") / "base", "phi3")


@pytest.fixture(scope="module")
def phi3(phi3_dir: Path) -> BaseModel:
    return read_base_model(phi3_dir)


@pytest.fixture
def fused_adapter(phi3_dir: Path, tmp_path: Path) -> Path:
    targets = ["qkv_proj", "gate_up_proj"]
    return make_tiny_adapter(tmp_path / "fused", phi3_dir, r=4, target_modules=targets)


def test_a_fused_module_is_bound_as_the_one_module_it_is(
    fused_adapter: Path, phi3: BaseModel
) -> None:
    inspected = inspect_folder(fused_adapter, phi3)
    assert [binding.module for binding in inspected.bindings] == [
        f"model.layers.{layer}.{module}"
        for layer in range(3)
        for module in ("mlp.gate_up_proj", "self_attn.qkv_proj")
    ]
    assert {(binding.rank, binding.scaling) for binding in inspected.bindings} == {(4, 4.0)}


def test_a_b_of_the_query_rows_alone_is_refused_by_name(
    fused_adapter: Path, phi3: BaseModel
) -> None:
    edit_tensors(fused_adapter, lambda tensors: tensors | {B_KEY: tensors[B_KEY][:64].clone()})
    with pytest.raises(AdapterFormatError, match="qkv_proj") as caught:
        inspect_folder(fused_adapter, phi3)
    assert (caught.value.code, caught.value.field) == ("shape_mismatch", B_KEY)


@pytest.mark.parametrize("split", [True, False])
def test_split_and_fused_adapters_are_not_taken_for_each_other(
    split: bool, fused_adapter: Path, phi3: BaseModel, tmp_path: Path
) -> None:
    llama_dir = make_tiny_model(tmp_path / "llama", "llama")
    if split:
        base, adapter = phi3, make_tiny_adapter(tmp_path / "split", llama_dir)
    else:
        base, adapter = read_base_model(llama_dir), fused_adapter
    with pytest.raises(AdapterFormatError, match="q_proj" if split else "qkv_proj") as caught:
        inspect_folder(adapter, base)
    assert caught.value.code == "foreign_tensor"
