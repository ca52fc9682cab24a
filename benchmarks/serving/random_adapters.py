"""PEFT adapters with random weights, which visibly change every output.

    python -m benchmarks.serving.random_adapters BASE_DIR OUT_DIR [--number 16] [--rank 16]

writes a00, a01, ...: all linears of every layer, alpha twice the rank, as PEFT saves them.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from adapter_store.base_model import BaseModel, read_base_model

B_STANDARD_DEVIATION = 0.02
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_names(number: int) -> list[str]:
    """a00, a01, ...: the names that the workload's mixes use."""
    return [f"a{index:02d}" for index in range(number)]


def write_adapters(base_dir: Path, out: Path, names: Sequence[str], rank: int = 16) -> list[Path]:
    """Write one adapter a name under `out`, each from a seed of its own; returns the folders."""
    base = read_base_model(base_dir)
    folders = [out / name for name in names]
    for seed, folder in enumerate(folders, 1000):
        _write(base, base_dir, folder, rank, seed)
    return folders


def _write(base: BaseModel, base_dir: Path, folder: Path, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, shape in base.linears.items():
        if module.rpartition(".")[2] not in MODULES:
            continue
        bound = 1 / math.sqrt(shape.in_features)  # PEFT's own initial A
        a = (2 * torch.rand(rank, shape.in_features, generator=generator) - 1) * bound
        b = torch.randn(shape.out_features, rank, generator=generator) * B_STANDARD_DEVIATION
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_dir),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(MODULES),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--number", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    names = adapter_names(options.number)
    for folder in write_adapters(options.base, options.out, names, options.rank):
        print(folder)


if __name__ == "__main__":
    main()
