"""Checkpoints whose layers have the values that a quantised base computes with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.quantization.scheme import Scheme


def dequantized_copy(model_dir: Path, folder: Path, scheme: Scheme) -> Path:
    """Save the model in float32 with every linear of its layers quantised and widened again."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = scheme.dequantized(module.weight.data)
    model.save_pretrained(folder)
    return folder
