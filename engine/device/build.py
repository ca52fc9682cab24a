"""From a model folder to a runner on a device; `engine.build_runner` is the CPU's."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch

from engine.attention import StaticAttention
from engine.build_runner import BuiltRunner, SamplerFactory, read_base
from engine.decode_buffers import decode_buffer_bytes
from engine.decode_ladder import DecodeLadder, ladder_sizes
from engine.device.device import Device
from engine.device.device_runner import DeviceRunner
from engine.device.memory_plan import MemoryNeeds, MemoryPlan, describe, plan_memory
from engine.device.profile import measure_step, profile_rows
from engine.device.setup import DeviceSetup
from engine.device.staging import InputStager
from engine.device.warm_up import warm_up
from engine.errors import ConfigError
from engine.grammar.grammars import Grammars
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig, read_decoder_config
from engine.models.load_decoder import load_decoder
from engine.ops import DecoderOps
from engine.padding import padded_rows
from engine.quantization.choose import choose_scheme
from engine.sampling.launched import LaunchingSampler, WaitingSampler
from lora_kernels.device_kernels import row_bytes
from lora_kernels.device_table import MAX_RANK

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_device_runner(
    model_dir: Path,
    setup: DeviceSetup,
    *,
    dtype: str = "auto",
    num_kv_blocks: int | None = None,
    block_size: int = 16,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 2048,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.9,
    decode_ladder: bool = True,
    name: str | None = None,
    make_sampler: SamplerFactory | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> BuiltRunner:
    """Load a model onto a device and build its runner; see `engine.build_runner.build_runner`.

    Memory is measured by a step at the token budget, then divided by `plan_memory`, whose
    arithmetic is logged. Kernels are compiled, and graphs of decode steps captured, before this
    returns.
    `kv_cache_dtype` is `auto` (the model's) or `fp8`: e4m3 with scales of 1, half the bytes.

    Raises ConfigError for a model or a setting that can never work, and for what does not fit.
    """
    if setup.max_lora_rank > MAX_RANK:
        raise ConfigError(
            f"max_lora_rank is at most {MAX_RANK} on a device, not {setup.max_lora_rank}"
        )
    config = read_decoder_config(model_dir, max_model_len)
    model_dtype = _choose_dtype(dtype, config)
    kv_dtype = _choose_kv_dtype(kv_cache_dtype, model_dtype)
    base = read_base(model_dir, name)
    length = config.max_model_len
    scheme = choose_scheme(quantization, dtype=model_dtype, device=setup.device.torch_device)
    ops, kernels = setup.make_ops(length), setup.kernels()
    before = setup.device.facts().own
    with _room_for(setup.device, "the model's weights and the adapters' rows do not fit"):
        decoder = load_decoder(
            config,
            base,
            dtype=model_dtype,
            num_slots=setup.max_loras,
            max_positions=length,
            ops=ops,
            kernels=kernels,
            device=setup.device.torch_device,
            scheme=scheme,
        )
    row_size = adapter_row_bytes(decoder, model_dtype)
    held = setup.device.facts().own - before
    grammars = Grammars.from_pretrained(
        model_dir, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    if make_sampler is None:
        sampler = setup.make_sampler(config, grammars)
    else:
        sampler = WaitingSampler(make_sampler(config.vocab_size, config.eos_token_ids))
    parts = _Parts(setup, config, ops, decoder, sampler, block_size, kv_dtype)
    budget = max(max_num_batched_tokens, max_num_seqs)
    stager = InputStager(
        setup.device,
        setup.ragged_batch(padded_rows(budget, decoder.row_tile), model_dtype),
        setup.ragged_batch(padded_rows(max_num_seqs, decoder.row_tile), model_dtype),
    )
    sizes = ladder_sizes(max_num_seqs) if decode_ladder else ()
    max_blocks = min(-(-length // block_size), num_kv_blocks or length)
    with _room_for(setup.device, f"a step of {budget} tokens does not fit beside the weights"):
        if setup.device.torch_device.type == "cuda":  # elsewhere nothing is compiled
            parts.warm_up(stager, budget, max_num_seqs)
        activations = parts.measure(stager, budget, max_num_seqs)
        graph_tensors = parts.measure(stager, max_num_seqs, max_num_seqs) if sizes else 0
    needs = MemoryNeeds(
        weights=max(held - setup.pool_rows * row_size, 0),
        activations=activations,
        num_graphs=len(sizes) * (2 if setup.max_loras else 1),
        graph_tensors=graph_tensors,
        buffers=parts.buffer_bytes(sizes, max_blocks)
        + setup.batch_bytes(padded_rows(budget, decoder.row_tile))
        + setup.batch_bytes(padded_rows(max_num_seqs, decoder.row_tile)),
        adapter_rows=setup.pool_rows,
        adapter_row_bytes=row_size,
        bytes_per_block=parts.bytes_per_block,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        max_loras=setup.max_loras,
        max_lora_rank=setup.max_lora_rank,
    )
    plan = plan_memory(
        setup.device.facts(), needs, utilization=gpu_memory_utilization, num_kv_blocks=num_kv_blocks
    )
    structlog.get_logger("engine.memory").info("memory", plan=plan.text)
    with _room_for(setup.device, f"lower gpu_memory_utilization: less is there than\n{plan.text}"):
        runner = parts.runner(stager, plan, sizes, max_blocks)
    return BuiltRunner(
        runner=runner,
        base=base,
        projections=config.projections,
        eos_token_ids=config.eos_token_ids,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=min(length, plan.num_kv_blocks * block_size),
        num_kv_blocks=plan.num_kv_blocks,
        dtype=str(model_dtype).removeprefix("torch."),
        device=str(setup.device.torch_device),
        max_lora_rank=setup.max_lora_rank,
        kernels=kernels,
        ops=ops,
        grammars=grammars,
        invariance=None,
        scheme=scheme,
    )


@contextmanager
def _room_for(device: Device, refusal: str) -> Generator[None]:
    """Within, whatever the device has no room for ends the start, with what there is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"{refusal}\n{describe(device.facts())}\n{first_line}") from error


def adapter_row_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Bytes of one rank row in every pool of a model."""
    tables = [projection.lora for projection in decoder.projections.values()]
    return sum(row_bytes(table.in_features, table.slice_sizes, dtype) for table in tables)


class _Parts:
    """What is built in steps, since the cache's size is known only once a step was measured."""

    def __init__(
        self,
        setup: DeviceSetup,
        config: DecoderConfig,
        ops: DecoderOps,
        decoder: Decoder,
        sampler: LaunchingSampler,
        block_size: int,
        kv_dtype: torch.dtype,
    ) -> None:
        self._setup = setup
        self._config = config
        self._ops = ops
        self._decoder = decoder
        self._sampler = sampler
        self._block_size = block_size
        self._kv_shape = config.kv_shape(block_size, kv_dtype)
        self._attention = ops.make_attention(config.attention_shape(block_size))

    def measure(self, stager: InputStager, num_tokens: int, max_num_seqs: int) -> int:
        return measure_step(
            self._setup.device,
            self._decoder,
            self._cache(1),
            self._attention,
            self._sampler,
            stager,
            profile_rows(num_tokens, max_num_seqs, self._config.max_model_len, self._block_size),
        )

    def warm_up(self, stager: InputStager, num_tokens: int, max_num_seqs: int) -> None:
        began = time.monotonic()
        warm_up(
            self._decoder,
            self._cache(1),
            self._attention,
            self._sampler,
            stager,
            pin=self._setup.device.pin,
            max_loras=self._setup.max_loras,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=num_tokens,
            max_model_len=self._config.max_model_len,
        )
        seconds = round(time.monotonic() - began, 1)
        structlog.get_logger("engine.kernels").info("kernels compiled", seconds=seconds)

    @property
    def bytes_per_block(self) -> int:
        """Of the KV cache, over all layers."""
        return self._kv_shape.bytes_per_block

    def buffer_bytes(self, sizes: tuple[int, ...], max_blocks: int) -> int:
        """What a ladder of these sizes holds beside its graphs, and the logits that they share."""
        if not sizes:
            return 0
        attention, total = self._attention, 0
        for size in sizes:
            total += decode_buffer_bytes(size, self._decoder.row_tile)
            if self._setup.max_loras:
                total += self._setup.batch_bytes(size)
            if isinstance(attention, StaticAttention):
                total += attention.static_plan_bytes(size, max_blocks)
        return total + sizes[-1] * self._config.vocab_size * self._decoder.dtype.itemsize

    def runner(
        self, stager: InputStager, plan: MemoryPlan, sizes: tuple[int, ...], max_blocks: int
    ) -> DeviceRunner:
        setup, dtype = self._setup, self._decoder.dtype
        kv_cache = self._cache(plan.num_kv_blocks + 1)
        ladder: DecodeLadder | None = None
        if sizes:
            ladder = DecodeLadder(
                self._decoder,
                kv_cache,
                self._attention,
                setup.device,
                sizes=sizes,
                max_blocks=max_blocks,
                padding_block=plan.num_kv_blocks,
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
            stager,
            ladder,
            has_side_stream=setup.device.torch_device.type == "cuda",
        )

    def _cache(self, num_blocks: int) -> KVCache:
        return self._ops.make_kv_cache(self._kv_shape, num_blocks)


def _choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return dtype
    if name != "fp8":
        raise ConfigError(f"kv_cache_dtype must be auto or fp8, not {name!r}")
    if dtype is torch.float32:
        raise ConfigError(
            "kv_cache_dtype: fp8 holds keys and values of bfloat16 and float16 models; dtype is "
            "float32"
        )
    return torch.float8_e4m3fn


def _choose_dtype(name: str, config: DecoderConfig) -> torch.dtype:
    if name == "auto":
        return config.checkpoint_dtype or torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
