"""What decides the step time of a dense decoder: parameters, K/V bytes, width of attention."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All weights are read in every step, and each is a multiplication and an addition a token."""

    name: str
    num_parameters: int
    num_layers: int
    attention_width: int
    """Query heads x their size."""
    kv_width: int
    """K/V heads x their size."""
    lora_width: int = 0
    """Inputs and outputs of all linear layers: parameters of an adapter of rank 1."""
    bytes_per_value: int = 2
    """Bytes of one weight, K or V: 2 in bfloat16."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads once."""
        return self.num_parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position's K and V in all layers."""
        return 2 * self.num_layers * self.kv_width * self.bytes_per_value

    def adapter_bytes(self, rank: int) -> int:
        """Of an adapter of all linear layers."""
        return rank * self.lora_width * self.bytes_per_value

    @classmethod
    def from_config(cls, name: str, config: dict[str, Any]) -> "ModelShape":
        """From the fields of a Hugging Face `config.json`: a decoder with a gated MLP.

        Raises ConfigError that names the field. Biases and norms of heads, some thousandths of the
        parameters, are not counted.
        """
        if any(field in config for field in ("num_local_experts", "num_experts")):
            raise ConfigError(f"{name}: num_experts: only dense models are simulated")
        hidden, layers = (
            _count(name, config, "hidden_size"),
            _count(name, config, "num_hidden_layers"),
        )
        heads = _count(name, config, "num_attention_heads")
        kv_heads = _count(name, config, "num_key_value_heads", heads)
        head_dim = _count(name, config, "head_dim", hidden // heads)
        vocabulary = _count(name, config, "vocab_size") * hidden
        attention = 2 * hidden * (heads + kv_heads) * head_dim
        inner = _count(name, config, "intermediate_size")
        mlp = 3 * hidden * inner
        width = 4 * hidden + 2 * (heads + kv_heads) * head_dim + 3 * (hidden + inner)
        num_embeddings = 1 if config.get("tie_word_embeddings") else 2
        return cls(
            name=name,
            num_parameters=layers * (attention + mlp + 2 * hidden)
            + num_embeddings * vocabulary
            + hidden,
            num_layers=layers,
            attention_width=heads * head_dim,
            kv_width=kv_heads * head_dim,
            lora_width=layers * width,
        )

    @classmethod
    def read(cls, model_dir: Path) -> "ModelShape":
        """From the `config.json` of a model folder. Raises ConfigError."""
        path = model_dir / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls.from_config(model_dir.name, config)


def _count(name: str, config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: {field} is {value!r}; it must be an integer of at least 1")
    return value


LLAMA_3_1_8B = ModelShape.from_config(
    "llama-3.1-8b",
    {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
)  # fmt: skip
"""8.03e9 parameters, 131,072 bytes of K/V a token in bfloat16."""
