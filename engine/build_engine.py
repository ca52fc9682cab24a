"""The runner that an engine's arguments ask for: of a CPU or of a GPU, with or without overlap."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import SchedulerConfig
from engine.engine_args import EngineArgs
from engine.runner.build_runner import BuiltRunner, build_runner
from engine.runner.overlapped_runner import OverlappedRunner
from engine.runner.protocol import Launch


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A runner, and how its steps are run."""

    built: BuiltRunner
    launch: Launch | None
    """Launches a step while the one before runs; None: steps run one after another."""
    close: Callable[[], None]
    """Stops the runner's threads."""


def build_engine(args: EngineArgs, config: SchedulerConfig) -> BuiltEngine:
    """Load the model and build the runner; raises ConfigError."""
    if args.device == "cuda":
        return _build_cuda(args, config)
    built = build_runner(
        Path(args.model_dir),
        dtype=args.dtype,
        num_kv_blocks=args.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=args.max_model_len,
        max_loras=config.max_loras,
        max_lora_rank=args.max_lora_rank,
        threads=args.num_threads,
        name=args.model_name,
        cpu_kernels=args.cpu_kernels,
        decode_ladder=args.effective_decode_ladder,
        quantization=args.quantization,
    )
    if not args.effective_async_scheduling:
        return BuiltEngine(built, None, _nothing)
    # Slots are changed while no step runs, so the core may go on to change them by itself.
    overlapped = OverlappedRunner(built.runner, threads=torch.get_num_threads())
    return BuiltEngine(built, overlapped.launch, overlapped.close)


def _build_cuda(args: EngineArgs, config: SchedulerConfig) -> BuiltEngine:
    # Late, so that an engine on a CPU loads none of it.
    from engine.device.build import build_device_runner
    from engine.device.device_runner import DeviceRunner
    from engine.device.setup import cuda_setup

    setup = cuda_setup(max_loras=config.max_loras, max_lora_rank=args.max_lora_rank)
    built = build_device_runner(
        Path(args.model_dir),
        setup,
        dtype=args.dtype,
        num_kv_blocks=args.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.gpu_memory_utilization,
        decode_ladder=args.effective_decode_ladder,
        kv_cache_dtype=args.kv_cache_dtype,
        name=args.model_name,
        quantization=args.quantization,
    )
    runner = built.runner
    assert isinstance(runner, DeviceRunner)
    launch = runner.launch if args.effective_async_scheduling else None
    return BuiltEngine(built, launch, runner.close)


def _nothing() -> None:
    """There are no threads to stop."""
