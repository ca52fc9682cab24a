"""A Llama of random weights, made where it runs, as our decoder and as transformers' model.

Both read the same tensors, so a peer costs no memory.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.decoder import Decoder, DecoderLayer
from engine.models.decoder_config import DecoderConfig
from engine.models.projection import Projection
from engine.models.projections import SPLIT_PROJECTIONS
from engine.ops import DecoderOps
from lora_kernels import LoraSlice
from lora_kernels.device_kernels import DeviceKernels, PinnedWeights

ROPE_THETA = 500_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    name: str
    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def linears(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Inputs and slices of a layer's four linears, as they are fused."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (query, kv, kv)),
            "out": (query, (self.hidden,)),
            "gate_up": (self.hidden, (self.inner, self.inner)),
            "down": (self.inner, (self.hidden,)),
        }

    @property
    def num_weights(self) -> int:
        """Elements that a decode step reads: all linears, and the output layer."""
        layer = sum(n * sum(sizes) for n, sizes in self.linears.values())
        return self.num_layers * layer + self.vocab_size * self.hidden

    @property
    def num_kv_values(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def lora_width(self) -> int:
        """Elements of an adapter of rank 1 on all linears."""
        return self.num_layers * sum(n * len(s) + sum(s) for n, s in self.linears.values())

    def with_layers(self, num_layers: int) -> "Shape":
        """The same with another depth."""
        return replace(self, num_layers=num_layers)


LLAMA_3_8B = Shape("Llama-3-8B", 128_256, 4096, 14_336, 32, 32, 8, 128)
TINY = Shape("tiny", 96, 64, 96, 2, 4, 2, 16)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a shape, linears fused as the decoder has them, norms all 1."""

    shape: Shape
    embedding: Tensor
    head: Tensor
    layers: tuple[dict[str, Tensor], ...]


def random_weights(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Weights:
    """Weights that keep activations near 1 in any depth."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(rows: int, columns: int, scale: float) -> Tensor:
        values = torch.empty(rows, columns, dtype=dtype, device=device)
        return values.normal_(0.0, scale, generator=generator)

    layers = tuple(
        {
            name: random(sum(sizes), inputs, inputs**-0.5)
            for name, (inputs, sizes) in shape.linears.items()
        }
        for _ in range(shape.num_layers)
    )
    embedding = random(shape.vocab_size, shape.hidden, 1.0)
    return Weights(shape, embedding, random(shape.vocab_size, shape.hidden, 0.02), layers)


def our_decoder(
    weights: Weights,
    ops: DecoderOps,
    kernels: DeviceKernels,
    *,
    num_slots: int,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Our decoder on these weights."""
    shape = weights.shape
    norm = torch.ones(shape.hidden, dtype=dtype, device=device)

    def projection(layer: dict[str, Tensor], name: str) -> Projection:
        inputs, sizes = shape.linears[name]
        table = kernels.make_table(inputs, sizes, num_slots, dtype)
        return Projection(ops.make_linear(layer[name]), table)

    layers = tuple(
        DecoderLayer(
            attention_norm=norm,
            attention_out_norm=None,
            mlp_norm=norm,
            mlp_out_norm=None,
            query_norm=None,
            key_norm=None,
            window=None,
            **{name: projection(layer, name) for name in shape.linears},
        )
        for layer in weights.layers
    )
    head = Projection(
        ops.make_linear(weights.head),
        kernels.make_table(shape.hidden, (shape.vocab_size,), num_slots, dtype),
    )
    embedding = ops.make_linear(weights.embedding, keep_rows=True)
    config = _decoder_config(shape, max_positions)
    return Decoder(config, ops, embedding, layers, norm, head, max_positions, dtype, device)


def transformers_model(
    weights: Weights, *, dtype: torch.dtype, device: torch.device
) -> LlamaForCausalLM:
    """Transformers' model on the same tensors, or on copies of them in another dtype."""
    shape = weights.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=NORM_EPS,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=dtype,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    state: dict[str, Tensor] = {
        "model.embed_tokens.weight": weights.embedding,
        "lm_head.weight": weights.head,
    }
    for name, parameter in model.named_parameters():
        if "norm" in name:
            state[name] = torch.ones(parameter.shape, dtype=dtype, device=device)
    for index, layer in enumerate(weights.layers):
        for name, (module, parts) in _MEMBERS.items():
            ends = _ends(shape.linears[name][1])
            for part, (first, last) in zip(parts, ends, strict=True):
                state[f"model.layers.{index}.{module}.{part}.weight"] = layer[name][first:last]
    model.load_state_dict({key: value.to(dtype) for key, value in state.items()}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model.eval()


def random_adapter(
    shape: Shape, rank: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, list[LoraSlice]]:
    """An adapter that has the same factors in every layer, so that it is quickly made."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(rows: int, columns: int, scale: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * scale).to(dtype)

    return {
        name: [
            LoraSlice(random(rank, inputs, inputs**-0.5), random(size, rank, rank**-0.5), 0.5)
            for size in sizes
        ]
        for name, (inputs, sizes) in shape.linears.items()
    }


def install(decoder: Decoder, slot: int, adapter: dict[str, PinnedWeights]) -> None:
    """Fill a slot of every layer; copies are queued on the current stream."""
    for key, projection in decoder.projections.items():
        projection.install(slot, adapter.get(key.name))


def packed(adapter: dict[str, list[LoraSlice]], pin: Any) -> dict[str, PinnedWeights]:
    """An adapter as slots take it; `pin` says where it waits."""
    return {
        name: PinnedWeights.pack(slices, slices[0].a.dtype, pin) for name, slices in adapter.items()
    }


def merged(weights: Weights, adapter: dict[str, list[LoraSlice]]) -> Weights:
    """Float32 weights with the adapter's update added: what it means."""
    layers: list[dict[str, Tensor]] = []
    for layer in weights.layers:
        wide = {name: weight.to(torch.float32, copy=True) for name, weight in layer.items()}
        for name, slices in adapter.items():
            ends = _ends(weights.shape.linears[name][1])
            for part, (first, last) in zip(slices, ends, strict=True):
                wide[name][first:last] += part.scaling * (part.b.float() @ part.a.float())
        layers.append(wide)
    return Weights(weights.shape, weights.embedding.float(), weights.head.float(), tuple(layers))


_MEMBERS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "out": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}


def _ends(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    indptr = [0]
    for size in sizes:
        indptr.append(indptr[-1] + size)
    return list(pairwise(indptr))


def _decoder_config(shape: Shape, max_positions: int) -> DecoderConfig:
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    return DecoderConfig(
        model_type="llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norm_eps=NORM_EPS,
        max_position_embeddings=max_positions,
        max_model_len=max_positions,
        tie_word_embeddings=False,
        projections=SPLIT_PROJECTIONS,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * shape.num_layers,
        inv_freq=tuple((1.0 / ROPE_THETA**exponents).tolist()),
        rope_scaling=1.0,
        activation="silu",
        unit_offset_norms=False,
        post_norms=False,
        embedding_scale=None,
        attention_scale=shape.head_dim**-0.5,
        attention_softcap=None,
        logit_softcap=None,
        eos_token_ids=(),
        checkpoint_dtype=None,
    )
