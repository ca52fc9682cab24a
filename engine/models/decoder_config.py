"""What the decoder needs of a Hugging Face config; refuses what would not be computed exactly."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ConfigError
from engine.models.families import FAMILIES, BiasRule, Family
from engine.models.projections import LayerProjections
from engine.runner.attention import AttentionShape
from engine.runner.kv_cache import KVShape

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""Types whose frequencies depend only on the position and on the longest sequence served. Those of
`dynamic` change with each length, so cached keys would differ from those of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder's shape, with every default resolved."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    max_model_len: int
    """The longest sequence that `inv_freq` holds for."""
    tie_word_embeddings: bool
    projections: LayerProjections
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """For each layer, how many positions a query sees, its own included; None: all."""
    inv_freq: tuple[float, ...]
    """[rotary_dim / 2] rotary frequencies; a head's channels past `rotary_dim` are not rotated."""
    rope_scaling: float
    """Factor of the rotary cosines and sines (yarn, longrope)."""
    activation: Literal["silu", "gelu_pytorch_tanh"]
    """Of the gate in the MLP."""
    unit_offset_norms: bool
    """Norms multiply by 1 + weight, in float32."""
    post_norms: bool
    """Each block's output is normed again before it is added to the residual."""
    embedding_scale: float | None
    attention_scale: float
    """Factor of the attention scores."""
    attention_softcap: float | None
    """Scores become ``softcap * tanh(score / softcap)``; None: they stay."""
    logit_softcap: float | None
    """The same for logits."""
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: torch.dtype | None
    """What config.json says that the weights are; None where it says nothing."""

    @property
    def attention_context(self) -> int | None:
        """Tokens of context at which a token's attention takes about as long as its linears do.

        On a CPU, where attention multiplies at two thirds of the linears' rate. Layers with a
        window count as nothing; None where all have one.
        """
        attention = self.windows.count(None) * self.num_heads * self.head_dim
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        weights = self.hidden_size * (heads + 3 * self.intermediate_size)
        return max(1, self.num_layers * weights // (3 * attention)) if attention else None

    def kv_shape(self, block_size: int, dtype: torch.dtype) -> KVShape:
        """The shape of a KV cache with blocks of `block_size` tokens."""
        return KVShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def attention_shape(self, block_size: int) -> AttentionShape:
        """The shape of attention over such a cache."""
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            windows=self.windows,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
        )


def read_decoder_config(model_dir: Path, max_model_len: int | None = None) -> DecoderConfig:
    """Read `config.json` and `generation_config.json`.

    `max_model_len` is the length of the longest sequence that will be run, in tokens; None: as long
    as the model allows. For longrope that is `original_max_position_embeddings`: transformers uses
    other frequencies for every position of a longer sequence, so asking for more gives those to
    all sequences.

    Raises ConfigError that names the field, for a model that would not be computed exactly.
    """
    raw = _read_json(model_dir / "config.json")
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise ConfigError(f"config.json: model_type {model_type!r} is not one of {list(FAMILIES)}")
    _refuse_su(raw)
    _refuse_quantized(raw)
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"{model_dir / 'config.json'} cannot be read: {error}") from error
    _refuse_unsupported(config, family)
    max_model_len = _max_model_len(config, max_model_len)
    inv_freq, rope_scaling = _rotary_frequencies(config, max_model_len)
    return DecoderConfig(
        model_type=str(model_type),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=max_model_len,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        projections=family.projections,
        qkv_bias=_has_bias(config, family.qkv_bias),
        o_bias=_has_bias(config, family.o_bias),
        mlp_bias=_has_bias(config, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(config, family),
        inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        activation=family.activation,
        unit_offset_norms=family.unit_offset_norms,
        post_norms=family.post_norms,
        embedding_scale=config.hidden_size**0.5 if family.scaled_embedding else None,
        attention_scale=_attention_scale(config, family),
        attention_softcap=_soft_cap(config, family, "attn_logit_softcapping"),
        logit_softcap=_soft_cap(config, family, "final_logit_softcapping"),
        eos_token_ids=_eos_token_ids(model_dir, config),
        checkpoint_dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
    )


def _refuse_su(raw: dict[str, Any]) -> None:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    if isinstance(rope, dict) and "su" in (rope.get("type"), rope.get("rope_type")):
        _refuse("rope_scaling.type", "su", "transformers reads the same only as 'longrope'")


def _refuse_quantized(raw: dict[str, Any]) -> None:
    quantized = raw.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        _refuse(
            "quantization_config.quant_method",
            method,
            "checkpoints that are quantised already are not served; serve the original one, "
            "quantised at start with --quantization int8, fp8, nf4 or int4",
        )


def _refuse_unsupported(config: Any, family: Family) -> None:
    architectures = list(config.architectures or [])
    if architectures != [family.architecture]:
        _refuse("architectures", architectures, f"only {family.architecture} is served")
    activation = getattr(config, family.activation_field)
    if activation != family.activation:
        _refuse(family.activation_field, activation, f"only {family.activation} is served")
    for field, expected in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = getattr(config, field, None)
        if value is not None and bool(value) is not expected:
            _refuse(field, value, "only causal attention is served")
    if config.num_attention_heads % config.num_key_value_heads:
        _refuse(
            "num_key_value_heads",
            config.num_key_value_heads,
            f"num_attention_heads ({config.num_attention_heads}) must be a multiple of it",
        )
    if _head_dim(config) % 2:
        _refuse("head_dim", _head_dim(config), "it must be even")
    _refuse_rope(config, family)


def _refuse_rope(config: Any, family: Family) -> None:
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type")
    if rope_type not in _ROPE_TYPES:
        _refuse("rope_parameters.rope_type", rope_type, f"only {_ROPE_TYPES} are served")
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not family.partial_rotary:
        _refuse("partial_rotary_factor", share, "only 1.0 is served")
    if not isinstance(share, int | float) or not 0 < share <= 1 or _rotary_dim(config) == 0:
        _refuse("partial_rotary_factor", share, "it must be above 0 and at most 1")
    if rope_type == "longrope":
        for field in ("short_factor", "long_factor"):
            factors = rope.get(field)
            size = (_rotary_dim(config) + 1) // 2
            if not isinstance(factors, list) or len(factors) != size:
                _refuse(f"rope_parameters.{field}", factors, f"it must be {size} numbers")


def _refuse(field: str, value: object, reason: str) -> NoReturn:
    raise ConfigError(f"config.json: {field} is {value!r}; {reason}")


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def _rotary_dim(config: Any) -> int:
    return int(_head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _max_model_len(config: Any, wanted: int | None) -> int:
    longest: int = config.max_position_embeddings
    rope = config.rope_parameters
    if wanted is None:
        if rope["rope_type"] == "longrope":
            return min(longest, rope["original_max_position_embeddings"])
        return longest
    if wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is more than the model's max_position_embeddings {longest}"
        )
    return wanted


def _attention_scale(config: Any, family: Family) -> float:
    if not family.scaled_scores:
        return _head_dim(config) ** -0.5
    return _positive("query_pre_attn_scalar", config.query_pre_attn_scalar) ** -0.5


def _soft_cap(config: Any, family: Family, field: str) -> float | None:
    cap = getattr(config, field) if family.scaled_scores else None
    return None if cap is None else _positive(field, cap)


def _positive(field: str, value: float) -> float:
    return value if value > 0 else _refuse(field, value, "it must be above 0")


def _has_bias(config: Any, rule: BiasRule) -> bool:
    return bool(getattr(config, rule)) if isinstance(rule, str) else rule


def _windows(config: Any, family: Family) -> tuple[int | None, ...]:
    num_layers: int = config.num_hidden_layers
    if family.windowed == "no":
        return (None,) * num_layers
    window: int | None = config.sliding_window
    if window is not None and window < 1:
        _refuse("sliding_window", window, "it must be at least 1")
    if family.windowed == "all":
        return (window,) * num_layers
    layer_types: list[str] = config.layer_types
    if len(layer_types) != num_layers:
        _refuse("layer_types", layer_types, f"it must name {num_layers} layers")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            _refuse("layer_types", layer_type, "only full and sliding attention are served")
        if layer_type == "sliding_attention" and window is None:
            _refuse("sliding_window", window, "layer_types has sliding layers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rotary_frequencies(config: Any, max_model_len: int) -> tuple[tuple[float, ...], float]:
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        # As `compute_default_rope_parameters` of each family's own rotary module.
        dim = _rotary_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / (rope["rope_theta"] ** exponents)).tolist()), 1.0
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu"), seq_len=max_model_len
    )
    return tuple(inv_freq.to(torch.float32).tolist()), float(scaling)


def _eos_token_ids(model_dir: Path, config: Any) -> tuple[int, ...]:
    generation = model_dir / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = config.eos_token_id
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
