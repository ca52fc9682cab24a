"""The decoder: pre-norm attention and gated MLP, for every family of `decoder_config`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapter_store.base_model import BaseModel
from engine.attention import AttentionBackend
from engine.batch_inputs import BatchInputs
from engine.kv_cache import KVCache
from engine.models.decoder_config import DecoderConfig
from engine.models.layers import GATED_ACTIVATIONS, RotaryTable, rms_norm, soft_cap
from engine.models.linear import Linear, Projection, padded_rows
from engine.models.projections import (
    ProjectionKey,
    ProjectionSpec,
    iter_projections,
    module_path,
)
from engine.models.weight_reader import WeightReader
from lora_kernels import CpuKernels
from lora_kernels.cpu_kernels import TORCH_KERNELS, CpuTable


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; norms as `rms_norm` takes them."""

    attention_norm: Tensor
    """Of what goes into attention."""
    attention_out_norm: Tensor | None
    """Of what attention adds to the residual."""
    mlp_norm: Tensor
    mlp_out_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    window: int | None


class Decoder:
    """A base model with room for adapters; all inputs of a step are arguments of `forward`."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        lm_head: Linear,
        max_positions: int,
    ) -> None:
        self.config = config
        self.layers = layers
        self._embedding = embedding
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._rotary = RotaryTable(config.inv_freq, config.rope_scaling, max_positions)
        self._gated = GATED_ACTIVATIONS[config.activation]
        # Rounded as transformers does: the root of 3072 is 55.5 in bfloat16.
        self._embedding_scale = (
            None
            if config.embedding_scale is None
            else torch.tensor(config.embedding_scale, dtype=embedding.dtype)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and the KV cache."""
        return self._embedding.dtype

    @property
    def lora_tables(self) -> dict[ProjectionKey, CpuTable]:
        """The adapter slots of every projection."""
        return {
            key: getattr(self.layers[key.layer], key.name).lora
            for key, _ in iter_projections(len(self.layers), self.config.projections)
        }

    def forward(
        self, inputs: BatchInputs, kv_cache: KVCache, attention: AttentionBackend
    ) -> Tensor:
        """Run a step and store its keys and values; returns [num_logits, vocab_size] logits.

        Logits are of the tokens in `inputs.logit_tokens`, in the decoder's dtype.
        """
        hidden = self.hidden_states(inputs, kv_cache, attention)
        return self.logits(hidden.index_select(0, inputs.logit_tokens))

    def hidden_states(
        self, inputs: BatchInputs, kv_cache: KVCache, attention: AttentionBackend
    ) -> Tensor:
        """[padded, hidden_size] before the final norm."""
        plan = attention.plan(inputs, kv_cache)
        rotate = self._rotary.lookup(inputs.positions)
        eps, head_dim = self.config.norm_eps, self.config.head_dim
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        x = F.embedding(inputs.token_ids, self._embedding)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(x, layer.attention_norm, eps), inputs.lora)
            heads = qkv.view(qkv.shape[0], -1, head_dim)
            query_key, value = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = query_key.split([num_heads, num_kv_heads], dim=1)
                normed = (
                    rms_norm(query, layer.query_norm, eps),
                    rms_norm(key, layer.key_norm, eps),
                )
                query_key = torch.cat(normed, dim=1)
            query, key = rotate(query_key).split([num_heads, num_kv_heads], dim=1)
            num_tokens = inputs.num_tokens
            kv_cache.write(index, key[:num_tokens], value[:num_tokens], inputs.slot_mapping)
            attended = attention.attend(query, kv_cache, index, layer.window, plan)
            update = layer.out(attended, inputs.lora)
            if layer.attention_out_norm is not None:
                update = rms_norm(update, layer.attention_out_norm, eps)
            x = x + update
            gate_up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps), inputs.lora)
            update = layer.down(self._gated(gate_up), inputs.lora)
            if layer.mlp_out_norm is not None:
                update = rms_norm(update, layer.mlp_out_norm, eps)
            x = x + update
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] before the final norm -> [rows, vocab_size]."""
        num_rows = hidden.shape[0]
        padded = hidden.new_zeros(padded_rows(num_rows), hidden.shape[1])
        padded[:num_rows] = hidden
        logits = self._lm_head(rms_norm(padded, self._final_norm, self.config.norm_eps))[:num_rows]
        cap = self.config.logit_softcap
        return logits if cap is None else soft_cap(logits, cap)


def load_decoder(
    config: DecoderConfig,
    base: BaseModel,
    *,
    dtype: torch.dtype,
    num_slots: int,
    max_positions: int,
    kernels: CpuKernels = TORCH_KERNELS,
) -> Decoder:
    """Read a checkpoint; raises ConfigError that names a missing, misshapen or unknown tensor.

    `kernels` make the adapter slots.
    """
    with WeightReader(base, dtype) as reader:
        embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)

        def make_table(in_features: int, sizes: tuple[int, ...]) -> CpuTable:
            return kernels.make_table(in_features, sizes, num_slots, dtype)

        layers = tuple(_load_layer(config, reader, i, make_table) for i in range(config.num_layers))
        final_norm = _load_norm(config, reader, "model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            reader.skip("lm_head.weight")
            # Unpacked, so that the embedding is held once.
            lm_head = Linear(embedding, pack=False)
        else:
            head = reader.take("lm_head.weight", config.vocab_size, config.hidden_size)
            lm_head = Linear(head)
        reader.check_all_taken()
    return Decoder(config, embedding, layers, final_norm, lm_head, max_positions)


def _load_layer(
    config: DecoderConfig,
    reader: WeightReader,
    index: int,
    make_table: Callable[[int, tuple[int, ...]], CpuTable],
) -> DecoderLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def projection(
        spec: ProjectionSpec, in_features: int, sizes: tuple[int, ...], has_bias: bool
    ) -> Projection:
        if len(spec.members) == 1:
            sizes = (sum(sizes),)
        paths = [module_path(index, member) for member in spec.members]
        named = list(zip(paths, sizes, strict=True))
        weight = torch.cat([reader.take(f"{path}.weight", n, in_features) for path, n in named])
        bias = (
            torch.cat([reader.take(f"{path}.bias", n) for path, n in named]) if has_bias else None
        )
        return Projection(Linear(weight, bias), make_table(in_features, sizes))

    def norm(name: str, size: int = hidden) -> Tensor:
        return _load_norm(config, reader, f"{module_path(index, name)}.weight", size)

    specs, head_norms, post_norms = config.projections, config.qk_norm, config.post_norms
    # Llama's name for the MLP's norm is Gemma 2's name for the norm of what attention adds.
    mlp_norm = "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm"
    return DecoderLayer(
        attention_norm=norm("input_layernorm"),
        attention_out_norm=norm("post_attention_layernorm") if post_norms else None,
        mlp_norm=norm(mlp_norm),
        mlp_out_norm=norm("post_feedforward_layernorm") if post_norms else None,
        query_norm=norm("self_attn.q_norm", config.head_dim) if head_norms else None,
        key_norm=norm("self_attn.k_norm", config.head_dim) if head_norms else None,
        qkv=projection(specs.qkv, hidden, (query_size, kv_size, kv_size), config.qkv_bias),
        out=projection(specs.out, query_size, (hidden,), config.o_bias),
        gate_up=projection(specs.gate_up, hidden, (inner, inner), config.mlp_bias),
        down=projection(specs.down, inner, (hidden,), config.mlp_bias),
        window=config.windows[index],
    )


def _load_norm(config: DecoderConfig, reader: WeightReader, name: str, size: int) -> Tensor:
    weight = reader.take(name, size)
    return weight.to(torch.float32).add(1.0) if config.unit_offset_norms else weight
