"""Small adapter files for tests of the blob store."""

import json
import os
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from adapter_store.digest import hash_files

CONFIG = json.dumps(
    {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
).encode()


def adapter_files(folder: Path, seed: int) -> tuple[str, Path]:
    """Weights made from `seed`, and the digest of them with `CONFIG`."""
    weights = folder / f"upload-{seed}.safetensors"
    draw = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {
            f"{prefix}.lora_A.weight": draw.standard_normal((2, 16), dtype=np.float32),
            f"{prefix}.lora_B.weight": draw.standard_normal((16, 2), dtype=np.float32),
        },
        weights,
    )
    return hash_files(CONFIG, weights), weights


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, lock files aside."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "locks"
    }


def age(path: Path, seconds: float) -> None:
    """Make a path look as if it had been put so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))
