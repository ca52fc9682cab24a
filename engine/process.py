"""The engine's process: `python -m engine.process [ARGS.json]`, else the document on stdin.

With `--beat-fd FD` it gives signs of life on a pipe, see `engine.hang_watch`.

Exit codes: 0 stopped by SIGTERM, 1 the engine failed, 2 a setting that can never work (one line on
standard error says which), 3 its parent is gone, 4 a step hung.
"""

import argparse
import dataclasses
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil
import structlog

from engine.config import SchedulerConfig
from engine.engine_args import EngineArgs, parse_engine_args
from engine.engine_info import EngineInfo
from engine.errors import ConfigError
from engine.hang_watch import end_when_hung
from engine.logs import configure_logs
from engine.parent import die_with_parent
from engine.parts import AdapterLimits, EngineParts
from engine.telemetry.journal import JournalConfig
from engine.telemetry.records import Objective
from engine.transport.server import EngineServer

if TYPE_CHECKING:  # it imports torch, see `build_parts`
    from engine.runner.build_runner import BuiltRunner

DEFAULT_MAX_NUM_SEQS: Mapping[str, int] = {"cpu": 32, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS: Mapping[str, int] = {"cpu": 224, "cuda": 2048}


def main(argv: Sequence[str]) -> int:
    """Run an engine until it is stopped; returns the exit code."""
    stop = _StopSignal()
    parser = argparse.ArgumentParser("engine.process")
    parser.add_argument("document", nargs="?", type=Path)
    parser.add_argument("--beat-fd", type=int)
    given = parser.parse_args(argv)
    try:
        args = parse_engine_args(_read_document(given.document))
        configure_logs(process="engine", generation=args.generation)
        die_with_parent(args.parent_pid)
        return serve(build_parts(args), args, stop, beat_fd=given.beat_fd)
    except ConfigError as error:
        sys.stderr.write(f"engine: {error}\n")
        return 2


def serve(
    parts: EngineParts,
    args: EngineArgs,
    stop: "_StopSignal | None" = None,
    *,
    beat_fd: int | None = None,
) -> int:
    """Serve an engine in this process, which SIGTERM stops; returns the exit code."""
    stop = stop or _StopSignal()
    try:
        server = EngineServer(
            parts,
            socket_path=Path(args.socket_path),
            generation=args.generation,
            drain_seconds=args.drain_seconds,
        )
        # A full collection looks at every object of every module: 170 ms without a step.
        gc.collect()
        gc.freeze()
        end_when_hung(lambda: server.last_turn, args.hang_seconds, beat_fd=beat_fd)
        stop.server = server
        structlog.get_logger("engine.process").info("engine_ready", model=parts.info.model)
        return server.run()
    finally:
        parts.close()


def build_parts(args: EngineArgs) -> EngineParts:
    """Load the model and size everything around it; raises `ConfigError`."""
    _check_folder(Path(args.cache_dir))
    config = scheduler_config(args)
    # Imports torch: settings that cannot work are refused before that takes its seconds.
    from engine.build_engine import build_engine

    engine = build_engine(args, config)
    limits = AdapterLimits(
        cache_dir=Path(args.cache_dir),
        max_cpu_loras=args.effective_max_cpu_loras,
        cpu_lora_bytes=args.cpu_lora_bytes or psutil.virtual_memory().total // 10,
        disk_lora_bytes=args.disk_lora_bytes,
        warm_up_seconds=args.warm_up_seconds,
    )
    built = dataclasses.replace(
        engine.built, max_full_values=_max_full_values(args, engine.built, limits)
    )
    config = dataclasses.replace(
        config,
        num_kv_blocks=built.num_kv_blocks,
        max_model_len=built.max_model_len,
        attention_context=built.attention_context,
    )
    return EngineParts.assemble(
        built.runner,
        built.load_adapter,
        config=config,
        limits=limits,
        info=_engine_info(args, built, config, limits),
        prepare_grammar=None if built.grammars is None else built.grammars.prepare,
        telemetry=JournalConfig(
            objective=Objective(
                ttft=args.slo_ttft_ms / 1000, seconds_per_token=args.slo_tpot_ms / 1000
            ),
            max_adapters=args.metrics_adapters,
        ),
        launch=engine.launch,
        close_runner=engine.close,
    )


def _max_full_values(args: EngineArgs, built: "BuiltRunner", limits: AdapterLimits) -> int:
    """Values that an adapter's own embedding and output layer may have together.

    A device's memory is planned without any. In host memory an adapter may take a slot's share of
    what may be cached, so that the adapters of all slots fit together.
    """
    if args.device == "cuda":
        return 0
    value_bytes = 4 if built.dtype == "float32" else 2
    return limits.cpu_lora_bytes // max(args.max_loras, 1) // value_bytes


def _engine_info(
    args: EngineArgs, built: "BuiltRunner", config: SchedulerConfig, limits: AdapterLimits
) -> EngineInfo:
    return EngineInfo(
        model=built.base.name,
        fingerprint=built.base.fingerprint,
        vocab_size=built.vocab_size,
        eos_token_ids=list(built.eos_token_ids),
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_loras=config.max_loras,
        max_lora_rank=args.max_lora_rank,
        max_full_values=built.max_full_values,
        dtype=built.dtype,
        device=built.device,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        lora_kernels=built.kernels.name,
        max_cpu_loras=limits.max_cpu_loras,
        cpu_lora_bytes=limits.cpu_lora_bytes,
        start_seconds=max(0.0, time.time() - psutil.Process().create_time()),
    )


def scheduler_config(args: EngineArgs) -> SchedulerConfig:
    """The scheduler's settings, before the model has said what its KV pool and length can be.

    Raises `ConfigError`.
    """
    max_num_seqs = args.max_num_seqs or DEFAULT_MAX_NUM_SEQS[args.device]
    return SchedulerConfig(
        num_kv_blocks=args.num_kv_blocks or 1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=(
            args.max_num_batched_tokens
            or max(DEFAULT_MAX_NUM_BATCHED_TOKENS[args.device], max_num_seqs)
        ),
        max_loras=args.max_loras,
        max_queue_len=args.max_queue_len,
        max_queued_per_tenant=args.max_queued_per_tenant,
        max_queued_per_adapter=args.max_queued_per_adapter,
        enable_prefix_cache=args.enable_prefix_cache,
    )


def _read_document(path: Path | None) -> bytes:
    if path is None:
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the arguments: {error}") from error


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cache_dir cannot be used: {error}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"cache_dir is not writable: {folder}")


class _StopSignal:
    """SIGTERM drains the server; before there is one, it ends the process.

    SIGINT is ignored: a terminal sends Ctrl-C to all processes of the service, and the supervisor
    stops them in order.
    """

    def __init__(self) -> None:
        self.server: EngineServer | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.server is None:
            raise SystemExit(0)
        self.server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
