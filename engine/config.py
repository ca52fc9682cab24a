"""Everything the engine is started with: complete and checked before anything is built."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

Policy = Literal["chunked", "prefill_first", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may do in a step; names as in vLLM."""

    num_kv_blocks: int
    block_size: int = 16
    """Tokens of a block; must divide 64. A service uses 16, the only size that the compiled
    attention takes. It sums in another order than PyTorch's attention, which takes all sizes, so
    answers may differ between 16 and other sizes."""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    max_loras: int = 8
    max_queue_len: int = 4096
    """Waiting requests over all tenants; more are refused with `queue_full`."""
    max_queued_per_tenant: int | None = None
    """Waiting requests of one tenant (`tenant_queue_full`); None: no limit besides the first."""
    max_queued_per_adapter: int | None = None
    """Those of one tenant for one adapter, or the base (`adapter_queue_full`); None: likewise."""
    policy: Policy = "chunked"
    """A service's is `chunked`; the others are what benchmarks and simulations compare it with."""
    enable_prefix_cache: bool = True
    slot_debt_tokens: int | None = None
    """Tokens that may be lent past a reservation before its victim is preempted; None: 16 x
    `max_num_batched_tokens`, as in a service."""
    attention_context: int | None = None
    """Context, in tokens, at which a token's attention takes as long as its linears. Chunks of
    prompts that are long beside it are shorter (see `step_work.py`); None: they are not."""
    output_weight: float = 2.0
    """What an output token is charged, in prompt tokens."""

    def __post_init__(self) -> None:
        for name in (
            "num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
            "max_model_len", "max_queue_len", "max_queued_per_tenant", "max_queued_per_adapter",
            "attention_context",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_loras < 0:
            raise ConfigError(f"max_loras must be at least 0, not {self.max_loras}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes in each step"
            )

    @property
    def max_sequence_len(self) -> int:
        """Prompt and output tokens of a sequence at most, the KV pool considered."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size)

    @property
    def slot_debt_limit(self) -> int:
        """Tokens lent past a reservation before its victim is preempted."""
        if self.slot_debt_tokens is not None:
            return self.slot_debt_tokens
        return 16 * self.max_num_batched_tokens
