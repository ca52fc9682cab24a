"""What the key of a tensor in an adapter file says: module, A or B, and how it is nested.

PEFT writes `base_model.model.<module path>.lora_A.weight`, where the module path is the one in the
model that was trained. For the decoder that is served it begins with `model.layers.N`. Other
trainers, converters and multimodal wrappers of the same decoder write other beginnings; the ones
in `_NESTING` are read, since what follows `layers.N` names the module without doubt.
"""

import re
from dataclasses import dataclass
from typing import Literal

_PEFT_PREFIX = "base_model.model."
_LORA_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_NESTING = re.compile(r"(?P<head>(?:(?:model|language_model)\.){0,4})(?P<tail>layers\.\d+\..+)")


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
        if not module.startswith("model.layers."):
            return module
        return self.head + module.removeprefix("model.")


@dataclass(frozen=True, slots=True)
class LoraKey:
    """A key of a LoRA matrix: the path of its module in the base, its side, and its nesting."""

    key: str
    module: str
    side: Literal["A", "B"]
    nesting: Nesting


def parse_lora_key(key: str) -> LoraKey | None:
    """The parts of a key of a LoRA matrix in a decoder layer, or None for any other key."""
    match = _LORA_KEY.fullmatch(key)
    if match is None:
        return None
    prefix, path = _split_prefix(match["path"])
    nested = _NESTING.fullmatch(path)
    if nested is None:
        return None
    nesting = Nesting(prefix, nested["head"], match["adapter"])
    side: Literal["A", "B"] = "A" if match["side"] == "A" else "B"
    return LoraKey(key, f"model.{nested['tail']}", side, nesting)


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
        ".lora_": "only lora_A.weight and lora_B.weight of linears in decoder layers are",
    }
    return next((reason for part, reason in reasons.items() if part in key), None)


def _split_prefix(path: str) -> tuple[str, str]:
    if path.startswith(_PEFT_PREFIX):
        return _PEFT_PREFIX, path.removeprefix(_PEFT_PREFIX)
    return "", path
