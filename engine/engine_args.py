"""Everything an engine process is started with, as one JSON document.

The supervisor writes it, `engine.process` reads it. None means "chosen from the machine and the
model"; the effective values are those of `engine.messages.EngineInfo`.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]

MAX_SOCKET_PATH = 99
"""Bytes of an ipc path at most; Linux cuts `sun_path` at 107, and zmq adds to it while binding."""


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of one engine process; checked by `parse_engine_args`."""

    model_dir: Text
    """Folder with config.json, tokenizer files and safetensors."""
    socket_path: Text
    """Where the ROUTER binds; its folder is made with mode 0700, or must have it."""
    cache_dir: Text
    """Adapters on local disk, `<digest>/` each; shared with the service."""
    generation: Positive
    """Number of this start; a supervisor never uses one twice."""
    parent_pid: Positive | None = None
    """The process ends when this, its parent, is gone; None: the parent it finds."""
    model_name: Text | None = None
    """Name of the base in replies and statistics; None: the folder's name."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: as the model was saved."""
    quantization: Literal["int8", "fp8", "nf4", "int4"] | None = None
    """Of the layers' weights, at start; needs `loraplex[quantization]`. None: none."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of keys and values. `auto`: the model's; `fp8`: 8-bit floats (e4m3), on a GPU only."""
    num_threads: Positive | None = None
    """CPU threads of a forward pass."""
    cpu_kernels: Text = "auto"
    """What computes on a CPU, LoRA and all else: a choice of `lora_kernels.cpu_kernels`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs; `cuda`: on the first GPU, see docs/gpu.md."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Of all of a GPU's memory, at most; what is left of it is the KV cache."""
    decode_ladder: bool | None = None
    """Decode on static, padded buffers, on a GPU in CUDA graphs. None: on a GPU, not on a CPU."""
    async_scheduling: bool | None = None
    """Plan a decode step while the one before runs. None: on a GPU, not on a CPU."""

    num_kv_blocks: Positive | None = None
    max_model_len: Positive | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    max_queue_len: Positive = 4096
    """Waiting requests over all tenants; then of one tenant, and of it for one adapter."""
    max_queued_per_tenant: Positive | None = 1024
    max_queued_per_adapter: Positive | None = 512
    enable_prefix_cache: bool = True

    max_loras: Count = 8
    max_lora_rank: Positive = 64
    max_cpu_loras: Positive | None = None
    """Adapters in host memory; None: 4 x `max_loras`, at least 32."""
    cpu_lora_bytes: Positive | None = None
    """Their bytes; None: a tenth of the machine's memory."""
    disk_lora_bytes: Positive = 20 * 2**30
    """Bytes under `cache_dir`, adapters in use not counted out."""
    warm_up_seconds: Seconds = 30.0
    """How long a new engine may load pinned and recently used adapters before it is ready."""

    drain_seconds: Seconds = 30.0
    """After SIGTERM, running requests may go on for so long."""
    hang_seconds: Annotated[float, Meta(gt=0)] = 120.0
    """A step that takes longer hangs: the process ends, to be started anew."""
    slo_ttft_ms: Annotated[float, Meta(gt=0)] = 500.0
    """The service's objective, by which requests are counted as good: time to first token, and mean
    time between two tokens."""
    slo_tpot_ms: Annotated[float, Meta(gt=0)] = 80.0
    metrics_adapters: Count = 50
    """Adapters with metrics of their own: those with most traffic. All others share theirs."""

    @property
    def effective_decode_ladder(self) -> bool:
        """Whether decode steps run on static buffers."""
        return self.device != "cpu" if self.decode_ladder is None else self.decode_ladder

    @property
    def effective_async_scheduling(self) -> bool:
        """Whether steps are planned while others run."""
        return self.device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def effective_max_cpu_loras(self) -> int:
        """Adapters in host memory at most."""
        if self.max_cpu_loras is not None:
            return self.max_cpu_loras
        return max(4 * self.max_loras, 32)


def parse_engine_args(document: bytes | str) -> EngineArgs:
    """Read and check the JSON document; raises `ConfigError` that names the field."""
    try:
        args = msgspec.json.decode(document, type=EngineArgs)
    except msgspec.DecodeError as error:
        raise ConfigError(f"engine arguments: {error}") from error
    if not Path(args.model_dir).is_dir():
        raise ConfigError(f"model_dir is not a folder: {args.model_dir}")
    if len(args.socket_path.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket_path has {len(args.socket_path.encode())} bytes, more than the "
            f"{MAX_SOCKET_PATH} that a Unix socket can take; use a shorter run directory"
        )
    if not Path(args.socket_path).is_absolute():
        raise ConfigError(f"socket_path must be absolute: {args.socket_path}")
    if args.kv_cache_dtype != "auto" and args.device == "cpu":
        raise ConfigError(
            f"kv_cache_dtype {args.kv_cache_dtype} needs device cuda: on a CPU keys and values "
            "stay in the model's dtype"
        )
    if args.effective_max_cpu_loras < args.max_loras:
        raise ConfigError(
            f"max_cpu_loras ({args.effective_max_cpu_loras}) must be at least max_loras "
            f"({args.max_loras}): an adapter passes through host memory on its way to a slot"
        )
    return args
