"""What must be right before anything is timed: values, graphs, waits, memory accesses."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_decode import Bench
from benchmarks.gpu_engine_kernels import DRAWS, draw, sampling_rows
from benchmarks.gpu_model import (
    Weights,
    install,
    merged,
    packed,
    random_adapter,
    transformers_model,
)
from engine.triton.to_device import FetchedTensor

WORST = 2.0
"""Our error against float32 may be so many times that of transformers in the same dtype."""
WORST_INTERPRETED = 6.0
"""Triton's interpreter cuts bfloat16 where a device rounds."""
EXACT = 1e-4
"""Largest difference of float32 logits, relative to the largest logit."""
_PROMPT, _STEPS = 21, 3


def wrong_values(bench: Bench, ranks: tuple[int, ...]) -> Iterator[str]:
    """Prefill, then decode, mixed adapters in one batch, against merged float32 weights."""
    shape, dtype, device = bench.shape, bench.dtype, bench.device
    adapters = [
        random_adapter(shape, rank, dtype=dtype, device=device, seed=seed)
        for seed, rank in enumerate(ranks)
    ]
    for slot, adapter in enumerate(adapters):
        install(bench.decoder, slot, packed(adapter, bench.setup.device.pin))
    slots: list[int | None] = [None, *range(len(ranks)), 0]
    prompts = [
        [(3 + 11 * row + 7 * place) % shape.vocab_size for place in range(_PROMPT)]
        for row in range(len(slots))
    ]
    got = [bench.eager(bench.rows(prompts, 0, slots))]
    tokens = [[int(row.argmax())] for row in got[0]]
    fed = [tokens]
    for step in range(_STEPS):
        rows = bench.rows(tokens, _PROMPT + step, slots)
        graphed, eager = bench.graphed(rows), bench.eager(rows)
        if not _close(graphed, eager, EXACT if dtype is torch.float32 else 2e-2):
            yield f"decode step {step}: a graph and the same step run eagerly"
        got.append(graphed)
        tokens = [[int(row.argmax())] for row in graphed]
        fed.append(tokens)
    for index, slot in enumerate(slots):
        ids = prompts[index] + [part[index][0] for part in fed[:-1]]
        weights = merged(bench.weights, {} if slot is None else adapters[slot])
        expected = _logits(weights, torch.float32, ids, device)
        ours = torch.stack([part[index] for part in got]).float()
        if dtype is torch.float32:
            if not _close(ours, expected, EXACT):
                yield f"row {index}: logits of slot {slot}"
            continue
        theirs = _logits(_narrow(weights, dtype), dtype, ids, device)
        worst = WORST_INTERPRETED if device.type == "cpu" else WORST
        if _error(ours, expected) > worst * _error(theirs, expected):
            yield f"row {index}: logits of slot {slot} are further from float32 than transformers'"


def hidden_waits(bench: Bench) -> Iterator[str]:
    """Where a step, its draws and their copy to the host make the host wait; CUDA only."""
    rows = bench.decode_rows(4, 2, 8)
    sampling = sampling_rows(DRAWS[:4])

    @torch.inference_mode()
    def run() -> FetchedTensor:
        return FetchedTensor(draw(bench.prepared(rows)(), sampling))

    run().wait()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        yield f"a decode step waits for the device: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sanitized(seconds: float) -> str | None:
    """Run the tiny checks under compute-sanitizer; None: clean, else what it said.

    Raises FileNotFoundError where it is not installed.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise FileNotFoundError("compute-sanitizer is not installed")
    script = Path(__file__).with_name("gpu_engine.py")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    try:
        done = subprocess.run(
            [*command, "--tiny", "--device", "cuda", "--checks-only"],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it was not through after {seconds:.0f} s"
    return None if done.returncode == 0 else done.stdout[-500:] + done.stderr[-500:]


def _logits(weights: Weights, dtype: torch.dtype, ids: list[int], device: torch.device) -> Tensor:
    """[_STEPS + 1, vocab_size]: after the prompt, and after each token that follows."""
    model = transformers_model(weights, dtype=dtype, device=device)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
    return logits[0, _PROMPT - 1 :].float()


def _narrow(weights: Weights, dtype: torch.dtype) -> Weights:
    layers = tuple(
        {name: part.to(dtype) for name, part in layer.items()} for layer in weights.layers
    )
    return Weights(weights.shape, weights.embedding.to(dtype), weights.head.to(dtype), layers)


def _error(got: Tensor, expected: Tensor) -> float:
    return (got.double() - expected.double()).square().mean().sqrt().item()


def _close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Not where anything is NaN."""
    scale = expected.float().abs().max().item()
    return (got.float() - expected.float()).abs().max().item() <= tolerance * scale
