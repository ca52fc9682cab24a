import json
import time
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from adapter_store.errors import AdapterFormatError
from adapter_store.module_rules import ModuleRules
from adapter_store.peft_config import PeftConfig, parse_config

LAYERS = (0, 1, 10, 11)
NAMES = [
    *(f"model.layers.{i}.self_attn.{p}_proj" for i in LAYERS for p in "qkvo"),
    *(f"model.layers.{i}.mlp.{p}_proj" for i in LAYERS for p in ("gate", "up", "down")),
    "model.layers.1.mlp",
    "model.embed_tokens",
    "lm_head",
    "layers.3.self_attn.q_proj",
    "model.language_model.layers.2.self_attn.q_proj",
]


def parse(**fields: Any) -> PeftConfig:
    raw = {"peft_type": "LORA", "target_modules": ["q_proj"], **fields}
    return parse_config(json.dumps(raw).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "mlp.up_proj"]},
        {"target_modules": ["proj", "_proj", "", "model.layers.1.mlp.up_proj"]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": r"model\.layers\.1\d?\.self_attn\.\w+"},
        {"target_modules": r"(?!.*language).*q_proj"},
        {"target_modules": "q_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 10]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [3, 2], "layers_pattern": ["h"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [3], "layers_pattern": ["h", "la.*"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.1\d\..*"},
        {"target_modules": ["up_proj", "q_proj"], "modules_to_save": ["mlp"]},
        {"target_modules": ["up_proj", "q_proj"], "modules_to_save": [r"layers\.1"]},
        {"target_modules": "lm_.*|.*embed_tokens"},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"self_attn.q_proj": 3}},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 3}},
        {"rank_pattern": {"^model.layers.1.*q_proj": 2, r"model\.layers\.\d+\.self_attn\..*": 5}},
        {"rank_pattern": {"layers.1": 2, "1.self_attn.q_proj": 4, "_proj": 6, "q.proj": 7}},
        {"alpha_pattern": {r"(?:0|10)\.self_attn\.q_proj": 2.5, ".*q_proj": 7}},
    ],
)
def test_targets_ranks_and_alphas_are_those_that_peft_finds(fields: dict[str, Any]) -> None:
    fields = {"target_modules": ["q_proj"], "r": 9, "lora_alpha": 11, **fields}
    theirs = LoraConfig(**fields)
    rules = ModuleRules(parse(**fields), NAMES, [])
    for name in NAMES:
        rule = rules.find(name)
        assert (rule is not None) == bool(check_target_module_exists(theirs, name)), name
        if rule is not None:
            key = get_pattern_key(theirs.rank_pattern.keys(), name)
            assert rule.rank == theirs.rank_pattern.get(key, 9), name
            key = get_pattern_key(theirs.alpha_pattern.keys(), name)
            assert rule.alpha == theirs.alpha_pattern.get(key, 11), name


def test_a_path_outside_the_layers_to_transform_is_refused() -> None:
    """PEFT's answer depends on how many targets the list has."""
    path = "model.layers.0.self_attn.q_proj"
    rules = ModuleRules(parse(target_modules=[path], layers_to_transform=[1]), NAMES, [])
    with pytest.raises(AdapterFormatError) as caught:
        rules.find(path)
    assert caught.value.field == "layers_to_transform"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", r"(\w+\.?)+!"),
        ("exclude_modules", r"(?:(?:.*a?)*b?)*#"),
        ("rank_pattern", {r"(?:.*.*)*.*.*.*.*!": 4}),
        ("modules_to_save", [r"(?:.|\w)*!"]),
    ],
)
def test_a_pattern_that_would_never_end_is_stopped(field: str, value: Any) -> None:
    start = time.thread_time()
    with pytest.raises(AdapterFormatError) as caught:
        ModuleRules(parse(**{field: value}), NAMES, [])
    assert (caught.value.code, caught.value.field) == ("pattern_too_slow", field)
    assert time.thread_time() - start < 15


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", "("),
        ("target_modules", "(" * 900 + ")" * 900),
        ("exclude_modules", "*"),
        ("rank_pattern", {"q_proj)": 4}),
        ("alpha_pattern", {"[": 4}),
        ("modules_to_save", ["a**"]),
    ],
)
def test_a_pattern_that_is_no_regular_expression_is_refused(field: str, value: Any) -> None:
    with pytest.raises(AdapterFormatError) as caught:
        ModuleRules(parse(**{field: value}), NAMES, [])
    assert (caught.value.code, caught.value.field) == ("invalid_config", field)
