"""Steps of one model on a device: measured with one KV block, then run with the real cache."""

import time
from typing import NamedTuple

import structlog
import torch

from engine.device.device_runner import DeviceRunner
from engine.device.memory_plan import MemoryNeeds
from engine.device.profile import measure_step, profile_rows
from engine.device.setup import DeviceSetup
from engine.device.staging import InputStager
from engine.device.warm_up import warm_up
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.runner.attention import StaticAttention
from engine.runner.decode_buffers import decode_buffer_bytes
from engine.runner.decode_ladder import DecodeLadder
from engine.runner.kv_cache import KVCache, KVShape
from engine.runner.padding import padded_rows
from engine.sampling.launched import LaunchingSampler
from lora_kernels.device_kernels import row_bytes


class StepLimits(NamedTuple):
    """The largest step that a device runs."""

    num_tokens: int
    num_rows: int
    graph_sizes: tuple[int, ...]
    """Rows of the decode steps that are captured as graphs; none: all steps are eager."""
    max_blocks: int
    """KV blocks of a row of those steps."""


class ModelSteps:
    """Steps of one model: first measured with a cache of one block, then run with the real one."""

    def __init__(
        self,
        setup: DeviceSetup,
        config: DecoderConfig,
        decoder: Decoder,
        sampler: LaunchingSampler,
        kv_shape: KVShape,
        limits: StepLimits,
    ) -> None:
        self._setup = setup
        self._config = config
        self._decoder = decoder
        self._sampler = sampler
        self._kv_shape = kv_shape
        self._limits = limits
        self._attention = decoder.ops.make_attention(config.attention_shape(kv_shape.block_size))
        self._stager = InputStager(
            setup.device,
            *(setup.ragged_batch(rows, decoder.dtype) for rows in self._staged_rows()),
        )

    def warm_up(self) -> None:
        """Compile the kernels of every kind of eager step."""
        began = time.monotonic()
        warm_up(
            self._decoder,
            self._make_cache(1),
            self._attention,
            self._sampler,
            self._stager,
            pin=self._setup.device.pin,
            max_loras=self._setup.max_loras,
            max_num_seqs=self._limits.num_rows,
            max_num_batched_tokens=self._limits.num_tokens,
            max_model_len=self._config.max_model_len,
        )
        seconds = round(time.monotonic() - began, 1)
        structlog.get_logger("engine.kernels").info("kernels compiled", seconds=seconds)

    def needs(self, held: int) -> MemoryNeeds:
        """Measure the largest steps, and say what has to fit.

        `held`: bytes of the model's weights and of the adapters' rows, as the device tells them.
        """
        setup, limits = self._setup, self._limits
        row_bytes = adapter_row_bytes(self._decoder, self._decoder.dtype)
        return MemoryNeeds(
            weights=max(held - setup.pool_rows * row_bytes, 0),
            activations=self._measure(limits.num_tokens),
            num_graphs=len(limits.graph_sizes) * (2 if setup.max_loras else 1),
            graph_tensors=self._measure(limits.num_rows) if limits.graph_sizes else 0,
            buffers=self._graph_buffer_bytes() + sum(map(setup.batch_bytes, self._staged_rows())),
            adapter_rows=setup.pool_rows,
            adapter_row_bytes=row_bytes,
            bytes_per_block=self._kv_shape.bytes_per_block,
            block_size=self._kv_shape.block_size,
            max_num_batched_tokens=limits.num_tokens,
            max_num_seqs=limits.num_rows,
            max_model_len=self._config.max_model_len,
            max_loras=setup.max_loras,
            max_lora_rank=setup.max_lora_rank,
        )

    def runner(self, num_kv_blocks: int) -> DeviceRunner:
        """Allocate the KV cache, capture the graphs of decode steps, and join it all."""
        setup, limits, dtype = self._setup, self._limits, self._decoder.dtype
        kv_cache = self._make_cache(num_kv_blocks + 1)  # one for the graphs' padding rows
        ladder: DecodeLadder | None = None
        if limits.graph_sizes:
            ladder = DecodeLadder(
                self._decoder,
                kv_cache,
                self._attention,
                setup.device,
                sizes=limits.graph_sizes,
                max_blocks=limits.max_blocks,
                padding_block=num_kv_blocks,
                make_lora=(lambda size: setup.static_batch(size, dtype))
                if setup.max_loras
                else None,
            )
            num_graphs = ladder.capture()
            structlog.get_logger("engine.graphs").info("decode graphs", graphs=num_graphs)
        return DeviceRunner(
            self._decoder,
            kv_cache,
            self._attention,
            self._sampler,
            setup.device,
            self._stager,
            ladder,
            has_side_stream=setup.device.torch_device.type == "cuda",
        )

    def _measure(self, num_tokens: int) -> int:
        return measure_step(
            self._setup.device,
            self._decoder,
            self._make_cache(1),
            self._attention,
            self._sampler,
            self._stager,
            profile_rows(
                num_tokens,
                self._limits.num_rows,
                self._config.max_model_len,
                self._kv_shape.block_size,
            ),
        )

    def _staged_rows(self) -> tuple[int, int]:
        """Rows of the staged adapter batches: of a step's tokens, and of its logits."""
        tile = self._decoder.row_tile
        return padded_rows(self._limits.num_tokens, tile), padded_rows(self._limits.num_rows, tile)

    def _graph_buffer_bytes(self) -> int:
        """What the ladder holds beside its graphs, and the logits that all of them share."""
        sizes, attention, total = self._limits.graph_sizes, self._attention, 0
        if not sizes:
            return 0
        for size in sizes:
            total += decode_buffer_bytes(size, self._decoder.row_tile)
            if self._setup.max_loras:
                total += self._setup.batch_bytes(size)
            if isinstance(attention, StaticAttention):
                total += attention.static_plan_bytes(size, self._limits.max_blocks)
        return total + sizes[-1] * self._config.vocab_size * self._decoder.dtype.itemsize

    def _make_cache(self, num_blocks: int) -> KVCache:
        return self._decoder.ops.make_kv_cache(self._kv_shape, num_blocks)


def adapter_row_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Bytes of one rank row in every pool of a model."""
    tables = [projection.lora for projection in decoder.projections.values()]
    return sum(row_bytes(table.in_features, table.slice_sizes, dtype) for table in tables)
