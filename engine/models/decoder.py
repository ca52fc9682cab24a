"""The decoder: pre-norm attention and gated MLP, for every family of `decoder_config`.

`engine.models.load_decoder` makes one from a checkpoint.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.models.decoder_config import DecoderConfig
from engine.models.own_weights import FINAL_NORM, NormPlace, OwnRows, OwnWeightsTable
from engine.models.projection import Projection
from engine.models.projections import (
    OUTPUT_PROJECTION,
    ProjectionKey,
    iter_projections,
    module_path,
)
from engine.models.rotary import RotaryTable
from engine.ops import (
    DecoderOps,
    HeadNorms,
    LinearOp,
    RotationOp,
    StoringRotation,
)
from engine.runner.attention import AttentionBackend
from engine.runner.batch_inputs import BatchInputs
from engine.runner.kv_cache import KVCache
from engine.runner.padding import padded_rows
from lora_kernels import EmbeddingTable, LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch

if TYPE_CHECKING:  # benchmarks make decoders where there is no checkpoint, and no adapter_store
    pass

FINAL_NORM_PATH = "model.norm"
"""Hugging Face's path of the norm before the output layer."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; norms as `DecoderOps.norm` takes them."""

    attention_norm: Tensor
    """Applied to what goes into attention."""
    attention_out_norm: Tensor | None
    """Applied to what attention adds to the residual (Gemma 2)."""
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
        ops: DecoderOps,
        embedding: LinearOp,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        lm_head: Projection,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.ops = ops
        self.layers = layers
        self.dtype = dtype
        """Of weights, activations and the KV cache."""
        self.embedding_lora = EmbeddingTable(
            config.vocab_size, config.hidden_size, lm_head.lora.num_slots
        )
        """The adapter slots of the embedding."""
        self.own_weights = OwnWeightsTable(
            _norm_places(config),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            unit_offset_norms=config.unit_offset_norms,
            num_slots=lm_head.lora.num_slots,
        )
        """The adapter slots of weights that replace the base's."""
        self._embedding = embedding
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._no_adapters = LoraBatch.from_runs([], [])
        self._rotary = RotaryTable(config.inv_freq, config.rope_scaling, max_positions, device)
        # Rounded to the dtype, as transformers does: the root of 3072 is 55.5 in bfloat16.
        self._embedding_scale = (
            None
            if config.embedding_scale is None
            else torch.tensor(config.embedding_scale, dtype=dtype)
        )

    @property
    def row_tile(self) -> int:
        """Tokens of a step come in multiples of this."""
        return self.ops.row_tile(self.dtype)

    @property
    def projections(self) -> dict[ProjectionKey, Projection]:
        """Every projection, with its adapter slots."""
        return {
            key: self._lm_head
            if key == OUTPUT_PROJECTION
            else getattr(self.layers[key.layer], key.name)
            for key, _ in iter_projections(len(self.layers), self.config.projections)
        }

    def forward(
        self, inputs: BatchInputs, kv_cache: KVCache, attention: AttentionBackend
    ) -> Tensor:
        """Run a step and store its keys and values; returns [num_logits, vocab_size] logits.

        Logits are of the tokens in `inputs.logit_tokens`, in the decoder's dtype.
        """
        ops = self.ops
        plan = attention.plan(inputs, kv_cache)
        rotate = ops.rotation(self._rotary, inputs.positions)
        storing = rotate if isinstance(rotate, StoringRotation) else None
        eps, activation, lora = self.config.norm_eps, self.config.activation, inputs.lora
        num_heads, head_dim = self.config.num_heads, self.config.head_dim
        own = self._own_rows(lora)
        x = self._embedding.take_rows(inputs.token_ids)
        if own is not None:
            own.embed_(x, inputs.token_ids)
        if self.embedding_lora.is_used:
            self.embedding_lora.add_(x, inputs.token_ids, lora)
        if self._embedding_scale is not None:
            x.mul_(self._embedding_scale)
        update: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if update is None:
                normed = ops.norm(x, layer.attention_norm, eps)
            else:
                normed = ops.add_and_norm_(x, update, layer.attention_norm, eps)
            if own is not None:
                own.norm_(normed, x, NormPlace(index, "attention_norm"))
            qkv = layer.qkv(normed, lora)
            heads = qkv.view(qkv.shape[0], -1, head_dim)
            if storing is not None:
                query = storing.store(
                    heads, num_heads, kv_cache, index, inputs.slot_mapping, self._norms(layer)
                )
            else:
                query, key, value = self._query_key_value(layer, heads, rotate)
                tokens = slice(inputs.num_tokens)
                kv_cache.write(index, key[tokens], value[tokens], inputs.slot_mapping)
            attended = attention.attend(query, kv_cache, index, layer.window, plan)
            if index == len(self.layers) - 1:
                # After the last attention, only tokens that are sampled from are still needed.
                x, attended, lora = self._only_sampling(inputs, x, attended)
                own = self._own_rows(lora)
            update = layer.out(attended, lora)
            if layer.attention_out_norm is not None:
                update = self._norm_update(
                    update, layer.attention_out_norm, own, NormPlace(index, "attention_out_norm")
                )
            normed = ops.add_and_norm_(x, update, layer.mlp_norm, eps)
            if own is not None:
                own.norm_(normed, x, NormPlace(index, "mlp_norm"))
            gate_up = layer.gate_up(normed, lora)
            update = layer.down(ops.activate(gate_up, activation), lora)
            if layer.mlp_out_norm is not None:
                update = self._norm_update(
                    update, layer.mlp_out_norm, own, NormPlace(index, "mlp_out_norm")
                )
        assert update is not None
        normed = ops.add_and_norm_(x, update, self._final_norm, eps)
        if own is not None:
            own.norm_(normed, x, FINAL_NORM)
        batch = lora if self._lm_head.is_adapted else self._no_adapters
        logits = self._lm_head(normed, batch)[: len(inputs.logit_slots)]
        if own is not None:
            own.project_(logits, normed)
        cap = self.config.logit_softcap
        return logits if cap is None else _soft_cap(logits, cap)

    def _own_rows(self, lora: LoraBatch | DeviceLoraBatch) -> OwnRows | None:
        if not self.own_weights.is_used:
            return None
        return self.own_weights.rows(lora, self.ops, self.config.norm_eps)

    def _norm_update(
        self, update: Tensor, weight: Tensor, own: OwnRows | None, place: NormPlace
    ) -> Tensor:
        normed = self.ops.norm(update, weight, self.config.norm_eps)
        if own is not None:
            own.norm_(normed, update, place)
        return normed

    def _query_key_value(
        self, layer: DecoderLayer, heads: Tensor, rotate: RotationOp
    ) -> tuple[Tensor, Tensor, Tensor]:
        eps = self.config.norm_eps
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        query_key, value = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.split([num_heads, num_kv_heads], dim=1)
            normed_heads = (
                self.ops.norm(query, layer.query_norm, eps),
                self.ops.norm(key, layer.key_norm, eps),
            )
            query_key = torch.cat(normed_heads, dim=1)
        query, key = rotate(query_key).split([num_heads, num_kv_heads], dim=1)
        return query, key, value

    def _norms(self, layer: DecoderLayer) -> HeadNorms | None:
        if layer.query_norm is None or layer.key_norm is None:
            return None
        return HeadNorms(layer.query_norm, layer.key_norm, self.config.norm_eps)

    def _only_sampling(
        self, inputs: BatchInputs, x: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor, LoraBatch | DeviceLoraBatch]:
        num_logits = len(inputs.logit_slots)
        if num_logits == inputs.num_tokens:
            return x, attended, inputs.lora

        def narrow(full: Tensor) -> Tensor:
            few = full.new_zeros(padded_rows(num_logits, self.row_tile), full.shape[1])
            torch.index_select(full, 0, inputs.logit_tokens, out=few[:num_logits])
            return few

        lora = inputs.logit_lora
        if lora is None:
            lora = LoraBatch.from_runs(inputs.logit_slots, [1] * num_logits)
        return narrow(x), narrow(attended), lora


def norm_names(config: DecoderConfig) -> dict[str, str]:
    """What Hugging Face calls the norms of a layer's residual stream, by `DecoderLayer`'s field.

    Llama's name for the MLP's norm is Gemma 2's name for the norm of what attention adds.
    """
    if not config.post_norms:
        return {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }


def _norm_places(config: DecoderConfig) -> dict[str, NormPlace]:
    names = norm_names(config).items()
    places = {
        module_path(layer, name): NormPlace(layer, field)
        for layer in range(config.num_layers)
        for field, name in names
    }
    return {**places, FINAL_NORM_PATH: FINAL_NORM}


def _soft_cap(logits: Tensor, cap: float) -> Tensor:
    return logits.to(torch.float32).div(cap).tanh_().mul_(cap).to(logits.dtype)
