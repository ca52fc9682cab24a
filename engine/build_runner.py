"""From a model folder to a runner that has proved itself: what an engine process starts with."""

from dataclasses import dataclass
from pathlib import Path

import torch

from adapter_store.base_model import BaseModel
from engine.adapter_weights import AdapterWeights
from engine.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner and what the engine reports about it."""

    runner: ModelRunner
    base: BaseModel
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_position_embeddings: int
    num_kv_blocks: int
    dtype: str
    device: str

    def load_adapter(self, digest: str, folder: Path) -> AdapterWeights:
        """Read an adapter for this runner; raises `AdapterUnavailable`. Safe on any thread."""
        raise NotImplementedError


def build_runner(
    model_dir: Path,
    *,
    dtype: str = "bfloat16",
    num_kv_blocks: int | None = None,
    block_size: int = 16,
    max_num_seqs: int = 32,
    max_model_len: int | None = None,
    max_loras: int = 8,
    max_lora_rank: int = 64,
    threads: int | None = None,
) -> BuiltRunner:
    """Load a model and build its runner.

    `num_kv_blocks` None takes a share of the memory at hand. `threads` is for torch, process-wide;
    None keeps torch's own choice. Raises `ConfigError` for what can never work.
    """
    raise NotImplementedError


def parse_dtype(name: str) -> torch.dtype:
    """`float32` or `bfloat16`; raises `ConfigError` for anything else."""
    raise NotImplementedError
