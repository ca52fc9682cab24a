"""What a config says, and which configs are refused by name."""

import shutil

import pytest
import torch

from engine.errors import ConfigError
from engine.models.decoder_config import read_decoder_config
from engine.runner.build_runner import build_runner
from tests.support.tiny_models import FAMILIES, FAMILY_CONFIGS, edit_config, make_tiny_model

PHI3_ROPE = FAMILY_CONFIGS["phi3"]["rope_parameters"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("configs")
    return {name: make_tiny_model(folder / name, name) for name in FAMILIES}


@pytest.fixture
def model(originals, tmp_path):
    def copy(family: str, **changes):
        shutil.copytree(originals[family], tmp_path / family)
        edit_config(tmp_path / family, **changes)
        return tmp_path / family

    return copy


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' is not one of"),
        ("llama", {"model_type": None}, "model_type None"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq"}},
            r"quantization_config\.quant_method is 'gptq'.* serve the original one",
        ),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ("llama", {"head_dim": 15}, "head_dim"),
        ("llama", {"is_causal": False}, "is_causal is False"),
        ("llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type is 'dynamic'",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor is 0.5",
        ),
        (
            "phi3",
            {"rope_parameters": PHI3_ROPE | {"rope_type": "linear", "factor": 2.0}},
            "got linear",
        ),
        ("phi3", {"rope_parameters": PHI3_ROPE | {"rope_type": "resonance"}}, "got resonance"),
        (
            "phi3",
            {"rope_parameters": PHI3_ROPE | {"long_factor": [1.0] * 5}},
            "long_factor field must have length 6, got 5",
        ),
        ("phi3", {"rope_scaling": {"type": "su"}}, "rope_scaling.type is 'su'; .* 'longrope'"),
        (
            "llama",
            {"rope_parameters": PHI3_ROPE | {"partial_rotary_factor": 1.0}},
            "rope_parameters.short_factor is .*; it must be 8 numbers",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            "partial_rotary_factor is 1.5; it must be above 0 and at most 1",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.05}},
            "partial_rotary_factor is 0.05",
        ),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        (
            "gemma2",
            {"hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; only gelu_pytorch_tanh",
        ),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0; it must be"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("qwen2", {"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "layer_types"),
        ("qwen2", {"sliding_window": 0}, "sliding_window"),
        (
            "qwen2",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            "sliding_window is None; layer_types has sliding layers",
        ),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_name(model, family, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_decoder_config(model(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("phi3", {"num_key_value_heads": 1}, r"qkv_proj.weight' is \(128, 64\), not \(96, 64\)"),
        (
            "phi3",
            {"intermediate_size": 95},
            r"gate_up_proj.weight' is \(192, 64\), not \(190, 64\)",
        ),
        ("gemma2", {"attention_bias": True}, r"lacks the tensor .*q_proj.bias'"),
        (
            "gemma2",
            {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
            r"6 tensors that config.json does not account for.*feedforward_layernorm",
        ),
    ],
)
def test_a_checkpoint_of_another_shape_or_family_is_refused_by_name(
    model, family, changes, message
):
    with pytest.raises(ConfigError, match=message):
        build_runner(model(family, **changes), num_kv_blocks=4)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_an_unreadable_config_is_refused(model, content):
    folder = model("llama")
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_decoder_config(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_decoder_config(tmp_path)


def test_the_older_form_of_rope_scaling_is_understood(model):
    old = {"rope_type": "linear", "factor": 4.0}
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    folder = model("llama", rope_parameters=None, rope_scaling=old, rope_theta=5000.0)
    before = read_decoder_config(folder)
    edit_config(folder, rope_parameters=new, rope_scaling=None, rope_theta=None)
    assert read_decoder_config(folder).inv_freq == before.inv_freq


@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
def test_phi3s_older_names_of_longrope_are_understood(model, rope_type):
    folder = model("phi3")
    expected = read_decoder_config(folder)
    old = {k: v for k, v in PHI3_ROPE.items() if k.endswith("_factor")} | {"type": rope_type}
    share = old.pop("partial_rotary_factor")
    edit_config(
        folder, rope_parameters=None, rope_scaling=old, rope_theta=1e4, partial_rotary_factor=share
    )
    assert read_decoder_config(folder) == expected
    assert len(expected.inv_freq) == 6 and expected.rope_scaling > 1


def test_longrope_is_served_up_to_where_its_frequencies_change_unless_asked(model):
    folder = model("phi3")
    short, same, long = (read_decoder_config(folder, n) for n in (None, 256, 257))
    assert (short.max_model_len, short.max_position_embeddings) == (256, 512)
    assert short == same
    assert long.inv_freq != short.inv_freq and long.rope_scaling == short.rope_scaling
    with pytest.raises(ConfigError, match="max_model_len 513 is more than"):
        read_decoder_config(folder, 513)


def test_eos_ids_come_from_the_generation_config_first(model):
    folder = model("llama")
    assert read_decoder_config(folder).eos_token_ids == (258,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_decoder_config(folder).eos_token_ids == (3, 5)
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=[7, 8])
    assert read_decoder_config(folder).eos_token_ids == (7, 8)


def test_windows_follow_the_layers(originals):
    assert read_decoder_config(originals["qwen2"]).windows == (None, 70, 70)
    assert read_decoder_config(originals["llama"]).windows == (None, None, None)
    assert read_decoder_config(originals["phi3"]).windows == (40, 40, 40)
    assert read_decoder_config(originals["gemma2"]).windows == (20, None, 20)


def test_the_context_at_which_attention_outweighs_linears_follows_the_shapes(model):
    shape = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    weights = 30 * (576 * 64 * (9 + 3 + 3 + 9) + 3 * 576 * 1536)
    operations_a_key = 30 * 9 * 64 * 4
    config = read_decoder_config(model("llama", **shape))
    assert config.attention_context == 2 * weights * 2 // 3 // operations_a_key == 2048


def test_layers_with_windows_do_not_count_against_long_contexts(originals):
    of_all, of_one, of_none = (
        read_decoder_config(originals[name]) for name in ("llama", "qwen2", "phi3")
    )
    assert of_none.attention_context is None
    assert of_all.attention_context is not None and of_one.attention_context is not None
    assert of_one.windows.count(None) == 1
    assert of_one.attention_context > 2 * of_all.attention_context


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, r"lacks the tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"intermediate_size": 95}, r"mlp.gate_proj.weight' is \(96, 64\), not \(95, 64\)"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "q_norm.weight"),
    ],
)
def test_a_checkpoint_that_differs_from_its_config_is_refused_by_name(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_runner(model("llama", head_dim=16, **changes), num_kv_blocks=4)


def test_a_tensor_that_nobody_asked_for_is_refused_by_name(model):
    folder = model("qwen2", model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"'model.layers.0.self_attn.k_proj.bias'"):
        build_runner(folder, num_kv_blocks=4)


def test_the_checkpoints_dtype_is_the_default(model, tmp_path):
    assert build_runner(model("llama"), num_kv_blocks=8).dtype == "float32"
    half = make_tiny_model(tmp_path / "half", dtype=torch.float16)
    assert build_runner(half, num_kv_blocks=8).dtype == "bfloat16"
