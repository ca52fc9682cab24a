"""Every family equals transformers, and transformers + PEFT, in float32."""

import pytest
import torch

from tests.support.model_lab import ModelLab, prompt_of
from tests.support.peft_reference import assert_exact
from tests.support.tiny_models import ALL_LINEARS, FAMILIES, modules_of

LOGIT_TOLERANCE = 1e-4

ADAPTERS = {
    "all": {"r": 16, "lora_alpha": 8, "target_modules": ALL_LINEARS},
    "q and v": {"r": 3, "target_modules": ["q_proj", "v_proj"]},
    "last of a fused projection": {"r": 8, "target_modules": ["v_proj", "up_proj"]},
    "one layer": {"r": 64, "target_modules": ALL_LINEARS, "layers_to_transform": [1]},
    "down only": {"r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ALL_LINEARS},
    "rank pattern": {
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"k_proj": 2, r"^model\.layers\.[01]\.mlp\.gate_proj": 24},
        "alpha_pattern": {"gate_proj": 12, "layers.2.self_attn.q_proj": 4},
        "target_modules": ALL_LINEARS,
    },
    "rslora with a rank pattern": {
        "r": 4,
        "lora_alpha": 16,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 16},
        "target_modules": ["q_proj", "v_proj", "o_proj"],
    },
}

VARIANTS = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "mistral, window of a tile": ("mistral", {"sliding_window": 64}),
    "qwen2 without window": ("qwen2", {"use_sliding_window": False}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama with longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [1.0 + i for i in range(8)],
            }
        },
    ),
    "phi3 with plain rope": ("phi3", {"rope_parameters": None, "sliding_window": None}),
    # Gemma 2's scale, caps and layer types stand in the config, where they mean nothing.
    "gemma": ("gemma2", {"model_type": "gemma"}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 with biases, its head untied": (
        "gemma2",
        {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "odd sizes": (
        "llama",
        {
            "hidden_size": 38,
            "num_attention_heads": 19,
            "num_key_value_heads": 1,
            "intermediate_size": 51,
            "vocab_size": 271,
        },
    ),
}


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, ModelLab] = {}

    def lab(family: str) -> ModelLab:
        if family not in made:
            made[family] = ModelLab(tmp_path_factory.mktemp(family), family)
        return made[family]

    return lab


def check(lab: ModelLab, slot: int | None, adapter, lengths: list[int]) -> None:
    for length in lengths:
        driver = lab.driver()
        prompt = [token % lab.built.vocab_size for token in prompt_of(length)]
        sequence = driver.add(prompt, slot)
        driver.generate([sequence], 12, chunk=33)
        reference = lab.reference(adapter).greedy(prompt, 12)
        assert_exact(sequence.output, reference)
        if sequence.output == reference.token_ids:
            difference = torch.stack(sequence.logits) - reference.logits
            assert difference.abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(labs, family):
    # 90 + 12 tokens pass a KV tile of 64 and every window of the tiny configs.
    check(labs(family), None, None, [1, 16, 90])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_variant_equals_transformers(tmp_path, variant):
    family, overrides = VARIANTS[variant]
    check(ModelLab(tmp_path, family, **overrides), None, None, [70])


def test_longrope_takes_the_long_factors_where_longer_sequences_are_asked_for(tmp_path):
    # transformers takes them from the first position past the 64th.
    lab = ModelLab(tmp_path, "phi3", original_max_position_embeddings=64, max_model_len=200)
    assert lab.built.max_model_len == 200
    adapter = lab.adapter("all", target_modules="all-linear")
    lab.install(0, adapter)
    check(lab, 0, adapter, [65, 150])
    short = ModelLab(tmp_path, "phi3")
    assert short.built.max_model_len == 64
    check(short, None, None, [40])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_on_all_linears_equals_peft(labs, family):
    lab = labs(family)
    config = ADAPTERS["all"] | {"target_modules": modules_of(family, ALL_LINEARS)}
    adapter = lab.adapter("all", **config)
    lab.install(0, adapter)
    check(lab, 0, adapter, [40])


@pytest.mark.parametrize("name", ADAPTERS)
def test_ranks_scalings_and_partial_adapters_equal_peft(labs, name):
    lab = labs("qwen3" if name == "one layer" else "smollm")
    adapter = lab.adapter(name, seed=len(name), **ADAPTERS[name])
    weights = lab.install(1, adapter)
    check(lab, 1, adapter, [24])
    if name == "one layer":
        assert {key.layer for key in weights.projections} == {1}
    if name == "down only":
        assert {key.name for key in weights.projections} == {"down"}


FUSED_ADAPTERS = {
    "qkv only": {"r": 5, "target_modules": ["qkv_proj"]},
    "gate and up only": {"r": 9, "lora_alpha": 3, "target_modules": ["gate_up_proj"]},
    "each with its own rank": {
        "r": 4,
        "rank_pattern": {"qkv_proj": 12, r"layers\.1\.mlp\.gate_up_proj": 1},
        "alpha_pattern": {"gate_up_proj": 20},
        "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"],
    },
}


@pytest.mark.parametrize("name", FUSED_ADAPTERS)
def test_adapters_of_modules_that_the_checkpoint_fuses_equal_peft(labs, name):
    lab = labs("phi3")
    adapter = lab.adapter(name, seed=len(name), **FUSED_ADAPTERS[name])
    weights = lab.install(2, adapter)
    check(lab, 2, adapter, [24])
    for key, fused in weights.projections.items():
        assert len(fused.slice_sizes) == 1, key


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_batch_changes_no_bit(tmp_path, family, dtype):
    lab = ModelLab(tmp_path, family, dtype=dtype)
    names = modules_of(family, ["q_proj", "gate_proj", "down_proj"])
    lab.install(0, lab.adapter("all", r=12, target_modules="all-linear"))
    lab.install(1, lab.adapter("some", seed=1, r=3, target_modules=names))
    requests = [(70, 0), (3, None), (41, 1), (64, 0), (17, None), (90, 1)]
    lab.check_alone_as_in_a_crowd(requests)


def test_a_sharded_checkpoint_equals_a_single_file(labs, tmp_path):
    sharded = ModelLab(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(sharded.model_dir.glob("model-*.safetensors"))) > 1
    assert sharded.built.base.fingerprint == labs("llama").built.base.fingerprint
    check(sharded, None, None, [20])
