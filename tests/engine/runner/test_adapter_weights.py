"""Loading an adapter: fused, rounded, of its true size, or unavailable with a reason."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from engine.errors import AdapterUnavailable
from engine.runner.adapter_weights import load_adapter
from tests.support.model_lab import ModelLab, digest_of

TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory):
    return ModelLab(tmp_path_factory.mktemp("adapters"), "llama", dtype="bfloat16")


@pytest.fixture
def folder(lab, tmp_path):
    original = lab.adapter("a", r=4, lora_alpha=6, target_modules=TARGETS)
    return shutil.copytree(original, tmp_path / "copy")


def test_slices_are_fused_scaled_and_rounded_to_the_models_dtype(lab, folder):
    weights = lab.load(folder)
    tensors = load_file(folder / WEIGHTS_FILE)
    fused = weights.projections[1, "qkv"]
    prefix = "base_model.model.model.layers.1.self_attn"
    for index, name in ((0, "q_proj"), (2, "v_proj")):
        part = fused.slice(index)
        assert part is not None and part.scaling == 1.5
        for got, key in ((part.a, "lora_A"), (part.b, "lora_B")):
            assert torch.equal(
                got.float(), tensors[f"{prefix}.{name}.{key}.weight"].bfloat16().float()
            )
    assert fused.slice(1) is None
    assert (weights.digest, weights.rank) == (digest_of(folder), 4)


def test_an_adapter_costs_its_true_rank_and_modules_only(lab, folder):
    weights = load_adapter(
        folder, digest_of(folder), lab.built.base, max_rank=64, dtype=torch.float32
    )
    assert {key.name for key in weights.projections} == {"qkv", "down"}
    one_layer = 4 * (2 * 64 + 64 + 32) + 4 * (96 + 64)  # A and B of q, v and down
    row_scalings = 3 * 4
    assert weights.nbytes == 3 * 4 * (one_layer + row_scalings)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / WEIGHTS_FILE).unlink(), "cannot be read"),
        (lambda f: (f / CONFIG_FILE).unlink(), "cannot be read"),
        (lambda f: (f / CONFIG_FILE).write_text("{"), "config"),
        (lambda f: (f / WEIGHTS_FILE).write_bytes(b"\x08" + bytes(15)), "header"),
        (lambda f: _cut(f / WEIGHTS_FILE), "_"),
        (lambda f: _edit_tensor(f, lambda t: t.fill_(float("nan"))), "not_finite"),
        (lambda f: _edit_tensor(f, lambda t: t.add_(1)), "hash to"),
        (lambda f: _edit_config(f, lora_alpha=7), "hash to"),
        (lambda f: _edit_config(f, r=65), "."),
    ],
    ids=[
        "no weights", "no config", "broken config", "broken header", "cut off", "NaN",
        "another value", "another scaling", "another rank",
    ],
)  # fmt: skip
def test_damaged_files_make_the_adapter_unavailable(lab, folder, damage, reason):
    digest = digest_of(folder)
    damage(folder)
    with pytest.raises(AdapterUnavailable, match=reason) as caught:
        lab.built.load_adapter(digest, folder)
    assert caught.value.digest == digest


def test_a_rank_over_the_engines_limit_is_unavailable(lab):
    folder = lab.adapter("large", r=65, target_modules=["q_proj"])
    with pytest.raises(AdapterUnavailable, match="rank_too_large"):
        lab.load(folder)


def _cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _edit_tensor(folder, edit) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    edit(next(iter(tensors.values())))
    save_file(tensors, folder / WEIGHTS_FILE)


def _edit_config(folder, **changes) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
