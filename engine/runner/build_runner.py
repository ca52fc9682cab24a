"""Builds a CPU runner from a model folder, and checks on the model that batches do not matter."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from adapter_store.base_model import BaseModel, read_base_model
from adapter_store.errors import BaseModelError
from engine.device.device import HostDevice
from engine.errors import ConfigError
from engine.grammar.grammars import Grammars
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig, read_decoder_config
from engine.models.load_decoder import load_decoder
from engine.models.projections import LayerProjections
from engine.ops import DecoderOps, choose_ops
from engine.quantization.choose import choose_scheme
from engine.quantization.scheme import Scheme
from engine.runner.adapter_weights import AdapterWeights, load_adapter
from engine.runner.attention import AttentionBackend
from engine.runner.attention_tiles import KV_TILE
from engine.runner.decode_ladder import DecodeLadder, ladder_sizes
from engine.runner.kv_cache import KVShape
from engine.runner.memory import available_bytes, check_num_kv_blocks, choose_num_kv_blocks
from engine.runner.model_runner import ModelRunner
from engine.runner.self_test import NUM_POSITIONS, InvarianceReport, check_batch_invariance
from engine.sampling.launched import RowSampler
from engine.sampling.sampler import Sampler
from lora_kernels import CpuKernels, choose_cpu_kernels
from lora_kernels.device_kernels import Kernels
from lora_kernels.errors import KernelUnavailable

SamplerFactory = Callable[[int, Sequence[int]], RowSampler]
"""Makes a sampler from the vocabulary's size and the EOS ids."""

if TYPE_CHECKING:
    from engine.device.device_runner import DeviceRunner

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner and what the engine reports about it."""

    runner: "ModelRunner | DeviceRunner"
    base: BaseModel
    projections: LayerProjections
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_position_embeddings: int
    max_model_len: int
    """Prompt and output tokens of a sequence at most, the KV pool considered."""
    num_kv_blocks: int
    dtype: str
    device: str
    max_lora_rank: int
    kernels: Kernels
    """The LoRA kernels in use."""
    ops: DecoderOps
    """The operations that the decoder uses."""
    grammars: Grammars | None
    """What keeps a row within its grammar; None if the model's tokenizer does not allow it."""
    invariance: InvarianceReport | None
    """What the self-test found; None if it was not asked for."""
    scheme: Scheme | None = None
    """How the layers' weights are quantised; None if they are not."""
    max_full_values: int | None = None
    """Most values that an adapter's own embedding and output layer may have; None: any number."""
    attention_context: int | None = None
    """See `DecoderConfig.attention_context`; None where it is not known."""

    def load_adapter(self, digest: str, folder: Path) -> AdapterWeights:
        """Read an adapter for this runner; raises `AdapterUnavailable`. Safe on any thread.

        On a thread other than the main one, OpenMP is limited to that thread. Another team would
        make more threads than cores; then libgomp stops letting threads spin, and steps slow down.
        """
        if threading.current_thread() is not threading.main_thread():
            torch.set_num_threads(1)  # for this thread's OpenMP; the main thread keeps its team
        return load_adapter(
            folder,
            digest,
            self.base,
            max_rank=self.max_lora_rank,
            max_full_values=self.max_full_values,
            dtype=getattr(torch, self.dtype),
            projections=self.projections,
            kernels=self.kernels,
            scheme=self.scheme,
        )


def build_runner(
    model_dir: Path,
    *,
    dtype: str = "auto",
    num_kv_blocks: int | None = None,
    block_size: int = 16,
    max_num_seqs: int = 32,
    max_model_len: int | None = None,
    max_loras: int = 8,
    max_lora_rank: int = 64,
    threads: int | None = None,
    self_test: bool = True,
    name: str | None = None,
    make_sampler: SamplerFactory | None = None,
    cpu_kernels: str = "auto",
    decode_ladder: bool = False,
    quantization: str | None = None,
) -> BuiltRunner:
    """Load a model and build its runner.

    Args:
        model_dir: folder with config.json, tokenizer files and safetensors.
        dtype: `float32`, `bfloat16` or `auto` (the checkpoint's, but bfloat16 for float16).
        num_kv_blocks: KV blocks of the scheduler; None: for a share of the available memory.
        block_size: tokens of a block; must divide 64.
        max_num_seqs: sequences that run at once.
        max_model_len: tokens of the longest sequence; None: what the model allows.
        max_loras: adapter slots.
        max_lora_rank: the largest rank that is served.
        threads: PyTorch's threads, for the whole process; None keeps PyTorch's choice.
        self_test: whether to check batch invariance; a failure is logged as a warning and reported
            in `invariance`.
        name: the base model's name; None: the folder's.
        make_sampler: None makes a `Sampler`.
        cpu_kernels: a choice of `choose_cpu_kernels`, for LoRA and all other operations.
        decode_ladder: whether decode steps run on static, padded buffers, as on a GPU.
        quantization: a name of `choose_scheme`; None: weights stay as they are.

    Raises ConfigError for a model or a setting that can never work.

    """
    if KV_TILE % block_size:
        raise ConfigError(f"block_size must divide {KV_TILE}, not {block_size}")
    if threads is not None:
        torch.set_num_threads(threads)
    config = read_decoder_config(model_dir, max_model_len)
    model_dtype = _choose_dtype(dtype, config)
    length = config.max_model_len
    base = read_base(model_dir, name)
    scheme = choose_scheme(quantization, dtype=model_dtype)
    kernels, ops = _choose_kernels(cpu_kernels)
    decoder = load_decoder(
        config,
        base,
        dtype=model_dtype,
        num_slots=max_loras,
        max_positions=max(length, NUM_POSITIONS),
        ops=ops,
        kernels=kernels,
        scheme=scheme,
    )
    kv_shape = config.kv_shape(block_size, model_dtype)
    num_blocks = _num_kv_blocks(kv_shape, num_kv_blocks, max_num_seqs, length)
    # The ladder's padding rows have a block of their own, which the scheduler does not know.
    kv_cache = ops.make_kv_cache(kv_shape, num_blocks + int(decode_ladder))
    attention = ops.make_attention(config.attention_shape(block_size))
    grammars = Grammars.from_pretrained(
        model_dir, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    if make_sampler is None:
        sampler = Sampler(config.vocab_size, config.eos_token_ids, ops, grammars)
    else:
        sampler = make_sampler(config.vocab_size, config.eos_token_ids)
    ladder: DecodeLadder | None = None
    if decode_ladder:
        ladder = DecodeLadder(
            decoder,
            kv_cache,
            attention,
            HostDevice(),
            sizes=ladder_sizes(max_num_seqs),
            max_blocks=min(-(-length // block_size), num_blocks),
            padding_block=num_blocks,
        )
    return BuiltRunner(
        runner=ModelRunner(decoder, kv_cache, attention, sampler, ladder),
        base=base,
        projections=config.projections,
        eos_token_ids=config.eos_token_ids,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=min(length, num_blocks * block_size),
        num_kv_blocks=num_blocks,
        dtype=str(model_dtype).removeprefix("torch."),
        device="cpu",
        max_lora_rank=max_lora_rank,
        kernels=kernels,
        ops=ops,
        grammars=grammars,
        invariance=_self_test(decoder, attention) if self_test else None,
        scheme=scheme,
        attention_context=config.attention_context,
    )


def read_base(model_dir: Path, name: str | None) -> BaseModel:
    """The base model of a folder; raises ConfigError."""
    try:
        return read_base_model(model_dir, name=name)
    except BaseModelError as error:
        raise ConfigError(str(error)) from error


def _choose_kernels(choice: str) -> tuple[CpuKernels, DecoderOps]:
    try:
        kernels, ops = choose_cpu_kernels(choice), choose_ops(choice)
    except (KernelUnavailable, ValueError) as error:
        raise ConfigError(f"cpu_kernels: {error}") from error
    log = structlog.get_logger("engine.kernels")
    log.info("CPU kernels chosen", lora=kernels.name, decoder=ops.name)
    reason = kernels.fallback_reason or ops.fallback_reason
    if reason is not None:
        log.warning("the engine runs on the slow path, through PyTorch", reason=reason)
    return kernels, ops


def _choose_dtype(name: str, config: DecoderConfig) -> torch.dtype:
    if name == "auto":
        return torch.float32 if config.checkpoint_dtype is torch.float32 else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be auto, float32 or bfloat16 on a CPU, not {name!r}")
    return _DTYPES[name]


def _num_kv_blocks(
    shape: KVShape, wanted: int | None, max_num_seqs: int, max_model_len: int
) -> int:
    available = available_bytes()
    if wanted is None:
        wanted = choose_num_kv_blocks(
            shape.bytes_per_block,
            block_size=shape.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            available=available,
        )
    check_num_kv_blocks(wanted, shape.bytes_per_block, available)
    return wanted


def _self_test(decoder: Decoder, attention: AttentionBackend) -> InvarianceReport:
    report = check_batch_invariance(decoder, attention)
    if not report.holds:
        structlog.get_logger("engine.self_test").warning(
            "tokens may depend on what shares their batch: this machine's math libraries sum in "
            "an order that changes with the batch's size",
            max_logit_difference=report.max_logit_difference,
            max_kv_difference=report.max_kv_difference,
        )
    return report
