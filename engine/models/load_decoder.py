"""Reads a checkpoint into a `Decoder`: fuses projections, quantises, makes the adapter slots."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.models.decoder import FINAL_NORM_PATH, Decoder, DecoderLayer, norm_names
from engine.models.decoder_config import DecoderConfig
from engine.models.projection import Projection
from engine.models.projections import ProjectionSpec, module_path
from engine.models.weight_reader import WeightReader
from engine.ops import DecoderOps, TorchOps
from engine.quantization.scheme import Scheme
from lora_kernels.cpu_kernels import TORCH_KERNELS
from lora_kernels.device_kernels import Kernels, Table

if TYPE_CHECKING:  # GPU benchmarks run where adapter_store is not installed
    from adapter_store.base_model import BaseModel


def load_decoder(
    config: DecoderConfig,
    base: "BaseModel",
    *,
    dtype: torch.dtype,
    num_slots: int,
    max_positions: int,
    ops: DecoderOps | None = None,
    kernels: Kernels = TORCH_KERNELS,
    device: torch.device | str = "cpu",
    scheme: Scheme | None = None,
) -> Decoder:
    """Read a checkpoint; raises ConfigError that names a missing, misshapen or unknown tensor.

    `ops` compute, by default PyTorch's; `kernels` make the adapter slots; both for `device`.
    `scheme` quantises the layers' linears; embedding, output layer and norms stay as they are.
    """
    ops = ops or TorchOps()
    reader = WeightReader(base, dtype, device)
    embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)

    def make_table(in_features: int, sizes: tuple[int, ...]) -> Table:
        return kernels.make_table(in_features, sizes, num_slots, dtype)

    layers = tuple(
        _load_layer(config, ops, reader, index, make_table, scheme)
        for index in range(config.num_layers)
    )
    final_norm = _load_norm(config, reader, f"{FINAL_NORM_PATH}.weight", config.hidden_size)
    # A tied head is the embedding too, so that the weight is held once.
    rows = ops.make_linear(embedding, keep_rows=True)
    if config.tie_word_embeddings:
        reader.skip("lm_head.weight")
        head = rows
    else:
        weight = reader.take("lm_head.weight", config.vocab_size, config.hidden_size)
        head = ops.make_linear(weight)
    lm_head = Projection(head, make_table(config.hidden_size, (config.vocab_size,)))
    reader.check_all_taken()
    return Decoder(config, ops, rows, layers, final_norm, lm_head, max_positions, dtype, device)


def _load_layer(
    config: DecoderConfig,
    ops: DecoderOps,
    reader: WeightReader,
    index: int,
    make_table: Callable[[int, tuple[int, ...]], Table],
    scheme: Scheme | None,
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
        weights = [reader.take(f"{path}.weight", n, in_features) for path, n in named]
        bias = (
            torch.cat([reader.take(f"{path}.bias", n) for path, n in named]) if has_bias else None
        )
        if scheme is None:
            linear = ops.make_linear(torch.cat(weights), bias)
        else:
            linear = scheme.make_linear(weights, bias)
        return Projection(linear, make_table(in_features, sizes))

    def norm(name: str, size: int = hidden) -> Tensor:
        return _load_norm(config, reader, f"{module_path(index, name)}.weight", size)

    specs, head_norms = config.projections, config.qk_norm
    norms = {field: norm(name) for field, name in norm_names(config).items()}
    return DecoderLayer(
        attention_norm=norms["attention_norm"],
        attention_out_norm=norms.get("attention_out_norm"),
        mlp_norm=norms["mlp_norm"],
        mlp_out_norm=norms.get("mlp_out_norm"),
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
