"""What `gpu_engine.py` measures, and what of it fits a device."""

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu_model import LLAMA_3_8B, TINY, Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    shape: Shape
    check_layers: int
    dtype: torch.dtype
    batches: tuple[int, ...]
    context: int
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    lora_batch: int
    peer_batch: int
    peer_adapters: int
    peer_prompt: int
    peer_tokens: int
    churn_steps: int


FULL = Plan(
    LLAMA_3_8B, 2, torch.bfloat16, (1, 2, 4, 8, 16, 32, 64, 128, 256), 512, (1, 4, 16, 64),
    (8, 16, 64, 128), 64, 16, 8, 128, 32, 300,
)  # fmt: skip
SMALL = Plan(TINY, 2, torch.bfloat16, (2,), 48, (2,), (4,), 2, 2, 2, 5, 2, 2)


def weight_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Of a model with its embedding."""
    return dtype.itemsize * (shape.num_weights + shape.vocab_size * shape.hidden)


def fitted(plan: Plan, free: int) -> tuple[Plan, list[str]]:
    """The same with fewer layers or rows where the free bytes ask for it, and what was left out.

    Weights get half of the memory, keys and values half of the rest; adapters' pools, activations
    and peers what is then left. The smallest batch that peers need stays, whatever it takes.
    """
    notes: list[str] = []
    shape = plan.shape
    depths = range(shape.num_layers, 1, -1)
    fitting = (n for n in depths if weight_bytes(shape.with_layers(n), plan.dtype) <= free // 2)
    layers = next(fitting, min(2, shape.num_layers))
    if layers < shape.num_layers:
        notes.append(f"for lack of memory: {layers} of {shape.num_layers} layers")
        shape = shape.with_layers(layers)
    rest = free - weight_bytes(shape, plan.dtype)
    row_bytes = plan.context * shape.num_kv_values * plan.dtype.itemsize
    least = max(plan.peer_batch, plan.batches[0])
    batches = tuple(n for n in plan.batches if n <= least or n * row_bytes <= rest // 2)
    if batches != plan.batches:
        notes.append(f"for lack of memory: no batches above {batches[-1]}")
    lora_batch = min(plan.lora_batch, batches[-1])
    return replace(plan, shape=shape, batches=batches, lora_batch=lora_batch), notes
