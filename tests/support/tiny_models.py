"""Tiny random models and PEFT adapters of every family, saved to a folder as users have them."""

from pathlib import Path

FAMILIES = ("llama", "smollm", "mistral", "qwen2", "qwen3")


def make_tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides) -> Path:
    """Save a random model of `family` (config, weights, generation config, tokenizer) and return `folder`."""
    raise NotImplementedError


def make_tiny_adapter(folder: Path, model_dir: Path, *, seed: int = 0, r: int = 8, lora_alpha: int = 16,
                      target_modules: list[str] | str = ("q_proj", "v_proj"), **lora_config) -> Path:
    """Save a random adapter for the model (both factors random) and return `folder`."""
    raise NotImplementedError
