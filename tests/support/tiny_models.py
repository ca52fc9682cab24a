"""Tiny random models and PEFT adapters of every family, saved to a folder as users have them."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 272
"""256 bytes, the special tokens, and a few ids that no text has."""
EOS_TOKEN_ID = 258

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    # Llama 3: rope scaling that bends the frequencies in bands.
    "llama": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    # SmolLM2: a Llama with three query heads on a KV head and tied embeddings.
    "smollm": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    # Mistral: every layer has a sliding window; heads wider than hidden_size / heads.
    "mistral": {"model_type": "mistral", "sliding_window": 24, "head_dim": 24},
    # Qwen2: q/k/v biases, yarn, a window in the upper layers only.
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 70,
        "max_window_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    # Qwen3: norms on q and k, explicit head_dim.
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    # Phi-3: q/k/v and gate/up fused in the checkpoint, 12 of 16 channels rotated, longrope with a
    # window in every layer.
    "phi3": {
        "model_type": "phi3",
        "sliding_window": 40,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
            "long_factor": [1.0, 1.5, 2.5, 6.0, 12.0, 20.0],
        },
    },
    # Gemma 2: soft caps low enough to bite, a window in every other layer.
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 24,
        "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 20,
        "tie_word_embeddings": True,
    },
}
FAMILIES = tuple(FAMILY_CONFIGS)
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED_BY_PHI3 = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
                  "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Save a random model of `family` and its tokenizer (one token a byte); returns `folder`."""
    values = COMMON | FAMILY_CONFIGS[family] | overrides
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        _randomise(model)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_adapter(
    folder: Path,
    model_dir: Path,
    *,
    seed: int = 0,
    r: int = 8,
    lora_alpha: int = 16,
    target_modules: Sequence[str] | str = ("q_proj", "v_proj"),
    strength: float = 0.5,
    **lora_config: Any,
) -> Path:
    """Save a PEFT adapter for the model, both factors random; returns `folder`.

    `strength` is how large an update is beside what it is added to.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import ModulesToSaveWrapper

    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=r, lora_alpha=lora_alpha, target_modules=targets, task_type="CAUSAL_LM", **lora_config
    )
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.24 has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, b in getattr(module, "lora_B", {}).items():
                a = module.lora_A[name].weight
                a.normal_(0, a.shape[1] ** -0.5, generator=generator)
                width = strength / (module.scaling[name] * b.weight.shape[1] ** 0.5)
                b.weight.normal_(0, width, generator=generator)
                if b.bias is not None:
                    b.bias.normal_(0, strength, generator=generator)
                if name in module.lora_magnitude_vector:
                    norms = module.lora_magnitude_vector[name].weight
                    factors = torch.empty_like(norms).uniform_(0.7, 1.4, generator=generator)
                    norms.mul_(factors)
            for name, b in getattr(module, "lora_embedding_B", {}).items():
                module.lora_embedding_A[name].normal_(0, 1, generator=generator)
                width = 0.5 * strength / (module.scaling[name] * b.shape[1] ** 0.5)
                b.normal_(0, width, generator=generator)
        for module in model.modules():
            if isinstance(module, ModulesToSaveWrapper):
                for own in module.modules_to_save.parameters():
                    drawn = torch.randn(own.shape, generator=generator)
                    own.add_(drawn * strength * own.std())
        if config.bias != "none":
            for name, parameter in model.named_parameters():
                if name.endswith(".bias") and ".lora_" not in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * strength)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def modules_of(family: str, names: Sequence[str] | str) -> list[str] | str:
    """What the family's checkpoints call Llama's modules; a pattern stays as it is."""
    if isinstance(names, str):
        return names
    if family != "phi3":
        return list(names)
    return list(dict.fromkeys(_FUSED_BY_PHI3.get(name, name) for name in names))


def _randomise(model: torch.nn.Module) -> None:
    """Weights large enough that the next token is rarely a near tie."""
    is_gemma = "gemma" in str(model.config.model_type)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(0.0 if is_gemma else 1.0, 0.2)
        elif name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
        elif "embed_tokens" in name:
            parameter.data.normal_(0.0, 0.15 if is_gemma else 0.5)
        else:
            parameter.data.normal_(0.0, 1.3 / parameter.shape[1] ** 0.5)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def edit_config(model_dir: Path, **changes: Any) -> None:
    """Change fields of a saved config.json; None removes one."""
    path = model_dir / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: v for name, v in values.items() if v is not None}))
