import dataclasses
import json
from typing import Any

import pytest
from peft import LoraConfig

from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import MAX_CONFIG_BYTES, PeftConfig, parse_config


def config_bytes(**fields: Any) -> bytes:
    return json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], **fields}).encode()


def parse(**fields: Any) -> PeftConfig:
    return parse_config(config_bytes(**fields))


def refusal(raw: bytes) -> AdapterFormatError:
    with pytest.raises(AdapterFormatError) as caught:
        parse_config(raw)
    return caught.value


def test_defaults_are_pefts(tmp_path: Any) -> None:
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    saved = parse_config((tmp_path / "adapter_config.json").read_bytes())
    assert saved == parse() == parse(bias=None, rank_pattern=None, alpha_pattern=None)
    assert (saved.r, saved.lora_alpha, saved.use_rslora) == (8, 8.0, False)


def test_every_field_of_the_installed_peft_is_known() -> None:
    for field in dataclasses.fields(LoraConfig):
        # A field of peft that is not known here would be called unknown.
        try:
            parse(**{field.name: {"some": "value"}})
        except AdapterFormatError as error:
            assert "not known and might matter" not in error.message, field.name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.experts"]),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1e-4}),
        ("velora_config", {"num_groups": 64}),
        ("monteclora_config", {"num_samples": 8}),
        ("use_bdlora", {"nblocks": 2}),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("a_field_of_2031", 1),
        ("a_field_of_2031", [0]),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_the_fields_name(
    field: str, value: Any
) -> None:
    error = refusal(config_bytes(**{field: value}))
    assert (error.code, error.field) == ("unsupported_field", field)
    assert field in error.message


@pytest.mark.parametrize("empty", [None, False, "", [], {}])
@pytest.mark.parametrize("field", ["use_qalora", "kasa_config", "layer_replication", "unknown"])
def test_a_field_that_holds_nothing_is_accepted(field: str, empty: Any) -> None:
    assert parse(**{field: empty}) == parse()


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.3},
        {"inference_mode": True, "revision": "main", "task_type": "CAUSAL_LM"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "mica"},
        {"corda_config": {"corda_method": "ipm"}},
        {"loftq_config": {"loftq_bits": 4}},
        {"runtime_config": {"ephemeral_gpu_offload": True}},
        {"peft_version": "0.19.0", "megatron_core": "megatron.core", "qalora_group_size": 32},
    ],
)
def test_fields_of_training_change_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


@pytest.mark.parametrize(("init", "to_zero"), [(True, True), (False, False), (None, False)])
def test_init_says_what_a_module_without_tensors_becomes(init: Any, to_zero: bool) -> None:
    assert parse(init_lora_weights=init).resets_to_zero is to_zero
    assert not parse(init_lora_weights="orthogonal").resets_to_zero
    assert parse(init_lora_weights="Gaussian").resets_to_zero


@pytest.mark.parametrize("peft_type", [None, "lora", "ADALORA", "IA3", 3, ["LORA"]])
def test_another_peft_type_is_refused(peft_type: Any) -> None:
    error = refusal(config_bytes(peft_type=peft_type))
    assert (error.code, error.field) == ("unsupported_peft_type", "peft_type")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", -1),
        ("r", None),
        ("r", "8"),
        ("r", 10**30),
        ("r", True),
        ("lora_alpha", 0),
        ("lora_alpha", None),
        ("lora_alpha", 10**400),
        ("lora_alpha", 1e300),
        ("alpha_pattern", {"q_proj": -1e300}),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", [1]),
        ("alpha_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": "8"}),
        ("target_modules", None),
        ("target_modules", 3),
        ("target_modules", [3]),
        ("target_modules", "x" * 3000),
        ("exclude_modules", {"a": 1}),
        ("layers_to_transform", "3"),
        ("layers_to_transform", [True]),
        ("layers_pattern", "layers"),
        ("modules_to_save", "lm_head"),
        ("rank_pattern", {f"layers.{i}": 4 for i in range(3000)}),
        ("use_rslora", "yes"),
        ("use_dora", "yes"),
        ("lora_bias", 1),
        ("bias", "some"),
        ("init_lora_weights", "kaiming"),
        ("init_lora_weights", 3),
    ],
)
def test_a_value_that_peft_could_not_use_is_refused(field: str, value: Any) -> None:
    error = refusal(config_bytes(**{field: value}))
    assert (error.code, error.field) == ("invalid_config", field)


def test_layers_with_a_regular_expression_are_refused_as_peft_does() -> None:
    raw = config_bytes(target_modules=".*q_proj", layers_to_transform=[1])
    assert refusal(raw).field == "layers_to_transform"
    with pytest.raises(ValueError, match="layers_to_transform"):
        LoraConfig(target_modules=".*q_proj", layers_to_transform=[1])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"peft_type": "LORA", "r": NaN}',
        b'{"peft_type": "LORA", "lora_alpha": 1e999}',
        b'{"peft_type": "LORA", "target_modules": ["\\ud800"]}',
        b'{"peft_type": "LORA", "r": ' + b"1" * 5000 + b"}",
        b'{"peft_type": "LORA", "peft_type": "LORA"}',
        b'{"peft_type": "LORA", "rank_pattern": {"a": 1, "a": 2}}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_json_that_is_malformed_or_ambiguous_is_refused(raw: bytes) -> None:
    assert refusal(raw).code == "invalid_config"


def test_a_huge_config_is_not_parsed() -> None:
    assert refusal(b"{" + b" " * MAX_CONFIG_BYTES + b"}").code == "config_too_large"


def test_canonical_json_does_not_depend_on_how_the_config_is_written() -> None:
    one = parse(target_modules=["v_proj", "q_proj"], lora_alpha=16, layers_to_transform=[1, 0])
    two = parse(target_modules=["q_proj", "v_proj"], lora_alpha=16.0, layers_to_transform=[0, 1])
    assert one.canonical_json() == two.canonical_json()
    assert parse(target_modules="ALL-linear").canonical_json() == (
        parse(target_modules="all-linear").canonical_json()
    )


def test_canonical_json_keeps_the_order_of_patterns() -> None:
    one = parse(rank_pattern={"q_proj": 2, ".*proj": 4})
    two = parse(rank_pattern={".*proj": 4, "q_proj": 2})
    assert one.canonical_json() != two.canonical_json()


def test_result_fields_survive_json() -> None:
    config = parse(layers_to_transform=1, rank_pattern={"q_proj": 2}, modules_to_save=["x"])
    assert json.loads(json.dumps(config.result_fields())) == config.result_fields()
