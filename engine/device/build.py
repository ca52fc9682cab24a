"""From a model folder to a runner on a device; `engine.runner.build_runner` is the CPU's."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch

from engine.device.device import Device
from engine.device.memory_plan import describe, plan_memory
from engine.device.model_steps import ModelSteps, StepLimits
from engine.device.setup import DeviceSetup
from engine.errors import ConfigError
from engine.grammar.grammars import Grammars
from engine.models.decoder_config import DecoderConfig, read_decoder_config
from engine.models.load_decoder import load_decoder
from engine.quantization.choose import choose_scheme
from engine.runner.build_runner import BuiltRunner, SamplerFactory, read_base
from engine.runner.decode_ladder import ladder_sizes
from engine.sampling.launched import WaitingSampler
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
    """Load a model onto a device and build its runner; see `engine.runner.build_runner`.

    A step at the token budget is run to measure its memory, which `plan_memory` then divides; its
    arithmetic is logged. Before this returns, kernels are compiled and the graphs of decode steps
    are captured. `kv_cache_dtype` is `auto` (the model's) or `fp8`: e4m3 with scales of 1, half the
    bytes.

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
    held = setup.device.facts().own - before
    grammars = Grammars.from_pretrained(
        model_dir, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    if make_sampler is None:
        sampler = setup.make_sampler(config, grammars)
    else:
        sampler = WaitingSampler(make_sampler(config.vocab_size, config.eos_token_ids))
    limits = StepLimits(
        num_tokens=max(max_num_batched_tokens, max_num_seqs),
        num_rows=max_num_seqs,
        graph_sizes=ladder_sizes(max_num_seqs) if decode_ladder else (),
        max_blocks=min(-(-length // block_size), num_kv_blocks or length),
    )
    kv_shape = config.kv_shape(block_size, kv_dtype)
    steps = ModelSteps(setup, config, decoder, sampler, kv_shape, limits)
    refusal = f"a step of {limits.num_tokens} tokens does not fit beside the weights"
    with _room_for(setup.device, refusal):
        if setup.device.torch_device.type == "cuda":  # elsewhere nothing is compiled
            steps.warm_up()
        needs = steps.needs(held)
    plan = plan_memory(
        setup.device.facts(), needs, utilization=gpu_memory_utilization, num_kv_blocks=num_kv_blocks
    )
    structlog.get_logger("engine.memory").info("memory", plan=plan.text)
    with _room_for(setup.device, f"lower gpu_memory_utilization: less is there than\n{plan.text}"):
        runner = steps.runner(plan.num_kv_blocks)
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
    """Turn a lack of device memory inside into a ConfigError that says how much there is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"{refusal}\n{describe(device.facts())}\n{first_line}") from error


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
