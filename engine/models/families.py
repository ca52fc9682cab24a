"""The model types that the decoder serves, and how each differs from Llama."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.models.projections import FUSED_PROJECTIONS, SPLIT_PROJECTIONS, LayerProjections

BiasRule = bool | Literal["attention_bias", "mlp_bias"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a model type differs from Llama."""

    architecture: str
    projections: LayerProjections = SPLIT_PROJECTIONS
    qkv_bias: BiasRule = False
    """A bool, or the name of the config field that decides."""
    o_bias: BiasRule = False
    mlp_bias: BiasRule = False
    qk_norm: bool = False
    windowed: Literal["no", "all", "by_layer"] = "no"
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` may leave a head's last channels unrotated."""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """The only value of `activation_field` that is served."""
    activation_field: str = "hidden_act"
    unit_offset_norms: bool = False
    """Norms multiply by 1 + weight, in float32."""
    post_norms: bool = False
    """Each block's output is normed again before it is added to the residual."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of hidden_size."""
    scaled_scores: bool = False
    """`query_pre_attn_scalar` scales attention; scores and logits have soft caps."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(architecture="MistralForCausalLM", windowed="all"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, windowed="by_layer"),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windowed="by_layer",
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        projections=FUSED_PROJECTIONS,
        windowed="all",
        partial_rotary=True,
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activation="gelu_pytorch_tanh",
        unit_offset_norms=True,
        scaled_embedding=True,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windowed="by_layer",
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        unit_offset_norms=True,
        post_norms=True,
        scaled_embedding=True,
        scaled_scores=True,
    ),
}
