"""What an engine runs with, as it tells its clients."""

import msgspec


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine runs with, all limits effective."""

    model: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: list[int]
    max_model_len: int
    """Prompt and output tokens of a sequence at most, the KV pool considered."""
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_lora_rank: int
    dtype: str
    device: str
    quantization: str | None = None
    """How the layers' weights are held; adapters bind to `fingerprint` whatever it is."""
    kv_cache_dtype: str = "auto"
    """Of keys and values; `auto`: as `dtype`."""
    lora_kernels: str = "torch"
    """The path that computes adapters' updates: `torch`, or `native/` and an instruction set."""
    max_full_values: int | None = None
    """Values of an adapter's own embedding and output layer together at most; None: any number."""
    max_cpu_loras: int = 32
    """Adapters in host memory, and their bytes."""
    cpu_lora_bytes: int = 2**30
    start_seconds: float = 0.0
    """From the start of its process until it was built: about what the next one will take."""
