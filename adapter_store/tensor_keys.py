"""What the key of a tensor in an adapter file says: module, part, and how it is nested.

PEFT writes `base_model.model.<module path>.lora_A.weight`, where the module path is the one in the
model that was trained. For the decoder that is served it begins with `model.layers.N`. Other
trainers, converters and multimodal wrappers of the same decoder write other beginnings; the ones
in `_NESTING` are read, since what follows `layers.N` names the module without doubt.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_PEFT_PREFIX = "base_model.model."
_LORA_KEY = re.compile(
    r"(?P<path>.+)\.lora_(?P<name>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?P<end>\.weight|\.bias)?"
)
_HEAD = r"(?P<head>(?:(?:model|language_model)\.){0,4})"
_NESTING = re.compile(_HEAD + r"(?P<tail>layers\.\d+\..+)")
_NESTED_MODULE = re.compile(_HEAD + r"(?P<tail>layers\.\d+\..+|embed_tokens)")

Part = Literal["A", "B", "B_bias", "embedding_A", "embedding_B", "magnitude"]
_PARTS: Mapping[tuple[str, str | None], Part] = {
    ("A", ".weight"): "A",
    ("B", ".weight"): "B",
    ("B", ".bias"): "B_bias",
    ("embedding_A", None): "embedding_A",
    ("embedding_B", None): "embedding_B",
    ("magnitude_vector", None): "magnitude",
    ("magnitude_vector", ".weight"): "magnitude",
}


@dataclass(frozen=True, slots=True)
class Nesting:
    """What surrounds the module path in a file's keys; one file has one nesting.

    `prefix` is PEFT's `base_model.model.` or empty, `head` what stands before `layers.N`, and
    `adapter` the adapter's name where the file kept it (`lora_A.default.weight`).
    """

    prefix: str
    head: str
    adapter: str | None

    @property
    def is_standard(self) -> bool:
        """Whether this is what PEFT writes for the decoder itself."""
        return self == Nesting(_PEFT_PREFIX, "model.", None)

    def __str__(self) -> str:
        adapter = "" if self.adapter is None else f".{self.adapter}"
        return f"{self.prefix}{self.head}layers.N.*.lora_A{adapter}.weight"

    def trained_path(self, module: str) -> str:
        """The path that a module of the base (`model.layers.…`) had in the trained model."""
        if not module.startswith(("model.layers.", "model.embed_tokens")):
            return module
        return self.head + module.removeprefix("model.")


@dataclass(frozen=True, slots=True)
class LoraKey:
    """A key of a LoRA tensor: the path of its module in the base, its part, and its nesting."""

    key: str
    module: str
    part: Part
    nesting: Nesting


def parse_lora_key(key: str) -> LoraKey | None:
    """What a key says of a LoRA tensor, or None for any other key.

    The module is one of a decoder layer, the embedding, or the output layer; the last is outside
    of the nesting, and is read only where the rest is nested as PEFT writes it.
    """
    match = _LORA_KEY.fullmatch(key)
    part = None if match is None else _PARTS.get((match["name"], match["end"]))
    if match is None or part is None:
        return None
    prefix, path = _split_prefix(match["path"])
    if path == "lm_head":
        return LoraKey(key, path, part, Nesting(prefix, "model.", match["adapter"]))
    nested = _NESTED_MODULE.fullmatch(path)
    if nested is None:
        return None
    nesting = Nesting(prefix, nested["head"], match["adapter"])
    return LoraKey(key, f"model.{nested['tail']}", part, nesting)


def base_tensor_name(key: str) -> str:
    """The name that a full weight (`…base_layer.weight`, `lm_head.weight`) has in the base."""
    _, path = _split_prefix(key)
    path = path.replace(".base_layer.", ".")
    nested = _NESTING.fullmatch(path)
    if nested is not None:
        return f"model.{nested['tail']}"
    outer = re.fullmatch(r"(?:(?:model|language_model)\.){0,4}(?P<tail>.+)", path)
    tail = path if outer is None else outer["tail"]
    return tail if tail.startswith("lm_head.") else f"model.{tail}"


def unservable_reason(key: str) -> str | None:
    """Why a tensor that PEFT knows but that is no plain LoRA matrix cannot be served."""
    reasons = {
        ".lora_magnitude_vector": "it is a DoRA magnitude",
        ".lora_embedding_": "it adapts an embedding",
        ".modules_to_save.": "it is a fully trained module",
        ".trainable_tokens": "it holds trained embedding rows",
        ".lora_": "only lora_A and lora_B of linears and of the embedding are",
    }
    return next((reason for part, reason in reasons.items() if part in key), None)


def _split_prefix(path: str) -> tuple[str, str]:
    if path.startswith(_PEFT_PREFIX):
        return _PEFT_PREFIX, path.removeprefix(_PEFT_PREFIX)
    return "", path
