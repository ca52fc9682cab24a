import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from adapter_store.base_model import BaseModel, read_base_model
from adapter_store.conformance import ConformanceReport
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import MAX_PATTERNS, parse_config
from adapter_store.saved_modules import take_saved
from tests.support.adapter_files import (
    edit_adapter_config,
    edit_tensors,
    inspect_folder,
    load_tensors,
    rename_keys,
    set_tensor,
)
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

PREFIX = "base_model.model."
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
V1 = f"{PREFIX}model.layers.1.self_attn.v_proj"


def refusal(folder: Path, base: BaseModel, **kwargs: Any) -> AdapterFormatError:
    with pytest.raises(AdapterFormatError) as caught:
        inspect_folder(folder, base, **kwargs)
    return caught.value


# Keys


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


# DoRA, biases and the two ends

EMBED = f"{PREFIX}model.embed_tokens"


def make_adapter(tmp_path: Path, base_dir: Path, **config: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make_tiny_adapter(tmp_path / "featured", base_dir, **config)


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


# Values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused(
    dtype: torch.dtype, value: float, adapter: Path, base: BaseModel
) -> None:
    key = f"{V1}.lora_B.weight"
    edit_tensors(adapter, lambda t: {k: v.to(dtype) for k, v in t.items()})
    assert not inspect_folder(adapter, base).report.no_op
    tensor = load_tensors(adapter)[key]
    tensor.view(-1)[-1] = value
    set_tensor(adapter, key, tensor)
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("not_finite", key)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
)
def test_other_dtypes_are_refused(dtype: torch.dtype, adapter: Path, base: BaseModel) -> None:
    key = f"{Q0}.lora_A.weight"
    set_tensor(adapter, key, load_tensors(adapter)[key].to(dtype))
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("unsupported_dtype", key)


def test_the_largest_and_smallest_finite_values_are_accepted(
    adapter: Path, base: BaseModel
) -> None:
    key = f"{Q0}.lora_B.weight"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        limits = torch.finfo(dtype)
        values = torch.tensor([limits.max, limits.min, limits.smallest_normal / 2, -0.0])
        set_tensor(adapter, key, values.to(dtype).repeat(32, 1))
        assert len(inspect_folder(adapter, base).bindings) == 4


@pytest.mark.parametrize(("side", "zero"), [("A", 0.0), ("B", 0.0), ("B", -0.0)])
def test_an_adapter_that_changes_nothing_says_so(
    side: str, zero: float, adapter: Path, base: BaseModel
) -> None:
    part = f"lora_{side}"
    edit_tensors(
        adapter,
        lambda t: {k: torch.full_like(v, zero) if part in k else v for k, v in t.items()},
    )
    report = inspect_folder(adapter, base).report
    assert report.no_op
    assert any("as the base does" in warning for warning in report.warnings)
    ones = torch.ones_like(load_tensors(adapter)[f"{V1}.{part}.weight"])
    set_tensor(adapter, f"{V1}.{part}.weight", ones)
    assert not inspect_folder(adapter, base).report.no_op


# Full weights


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


# The whole file


def test_a_file_without_lora_matrices_is_refused(adapter: Path, base: BaseModel) -> None:
    edit_tensors(adapter, lambda _: {})
    assert refusal(adapter, base).code == "no_tensors"
    key = f"{PREFIX}model.norm.weight"
    edit_tensors(adapter, lambda _: {key: torch.ones(32)})
    error = refusal(adapter, base)
    assert error.code == "no_modules_bound"
    assert key in error.message


def test_the_report_says_what_is_bound(base_dir: Path, base: BaseModel, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(
        tmp_path / "adapter",
        base_dir,
        target_modules=["q_proj", "up_proj"],
        r=4,
        alpha_pattern={"1.*up_proj": 2},
    )
    inspected = inspect_folder(adapter, base)
    report = inspected.report
    assert report.digest == inspected.digest
    assert [(m.module, m.layers, m.count, m.rank, m.scaling) for m in report.modules] == [
        ("mlp.up_proj", "1", 1, 4, 0.5),
        ("mlp.up_proj", "0", 1, 4, 4.0),
        ("self_attn.q_proj", "0-1", 2, 4, 4.0),
    ]
    assert report.scalings == [0.5, 4.0]
    assert report.dtypes == ["F32"]
    assert report.bytes == (adapter / "adapter_model.safetensors").stat().st_size
    assert report.base_match.same_name is True
    assert report.base_match.fingerprint == base.fingerprint
    assert msgspec.json.decode(msgspec.json.encode(report), type=ConformanceReport) == report
    edit_adapter_config(adapter, base_model_name_or_path="org/other-7b")
    assert inspect_folder(adapter, base).report.base_match.same_name is False


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_damage_is_refused_or_leaves_every_tensor_bound(
    data: st.DataObject, saved_adapter: Path, base: BaseModel, tmp_path: Path
) -> None:
    """Never another exception, never an adapter with nothing bound, never a key left aside."""
    config = bytearray((saved_adapter / "adapter_config.json").read_bytes())
    content = bytearray((saved_adapter / "adapter_model.safetensors").read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    target, limit = data.draw(
        st.sampled_from([(config, len(config)), (content, header_bytes), (content, len(content))])
    )
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, limit - 1))
        target[where : where + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    try:
        inspected = inspect_folder(tmp_path, base)
    except AdapterFormatError:
        return
    bound = {key for b in inspected.bindings for key in (b.a_key, b.b_key)}
    assert bound
    assert bound == load_tensors(tmp_path).keys()
