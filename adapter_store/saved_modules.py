"""`modules_to_save`: modules of which an adapter brings the whole weight, in place of the base's.

PEFT saves such a weight under the key that it has in the trained model. What is served: the norms
of the residual stream, the embedding and the output layer. Follows `_set_trainable` and
`ModulesToSaveWrapper` of peft 0.21.2 (`utils/other.py`): a name matches every module whose path
ends with it, in the middle of a word too, and a module that is matched brings all within it.
"""

import math
import re
from collections.abc import Collection, Mapping
from itertools import accumulate

from adapter_store.base_model import EMBEDDING, OUTPUT_LAYER, BaseModel
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import PeftConfig
from adapter_store.safetensors_header import TensorInfo, shown

_NORM = re.compile(r"model\.(layers\.\d+\.\w+_layernorm|norm)")
_PEFT_ROOT = ("base_model", "model")


def take_saved(
    config: PeftConfig,
    base_copies: dict[str, str],
    base: BaseModel,
    adapted: Collection[str],
) -> dict[str, str]:
    """Move full weights that the config says are trained from the copies, by their module.

    `base_copies` maps keys to the base's tensors, `adapted` are the modules with LoRA. Raises
    AdapterFormatError where PEFT would look for a weight that is not there, or do more than that.
    """
    saved: dict[str, str] = {}
    for key, name in list(base_copies.items()):
        module = name.removesuffix(".weight")
        if not is_served(module) or not is_saved(config, key, module):
            continue
        if module in saved or module in adapted:
            reason = "it has LoRA too" if module in adapted else f"{shown(saved[module])} is too"
            raise AdapterFormatError(
                "unsupported_tensor",
                f"{shown(key)} cannot be served: it is the weight of '{module}', and {reason}",
                field=shown(key, quote=False),
            )
        if config.ensure_weight_tying and module in (EMBEDDING, OUTPUT_LAYER):
            raise AdapterFormatError(
                "unsupported_field",
                f"`ensure_weight_tying` is not served for '{module}'",
                field="ensure_weight_tying",
            )
        saved[module] = key
        del base_copies[key]
    _check_complete(config, saved, base)
    return saved


def is_saved(config: PeftConfig, key: str, module: str) -> bool:
    """Whether PEFT takes a tensor of the file for a weight that takes the place of the base's."""
    return ".base_layer." not in key and any(
        _is_within(module, name) for name in config.modules_to_save
    )


def is_served(module: str) -> bool:
    """Whether a module's whole weight can be an adapter's own."""
    return module in (EMBEDDING, OUTPUT_LAYER) or _NORM.fullmatch(module) is not None


def check_sizes(
    saved: Mapping[str, str], tensors: Mapping[str, TensorInfo], max_values: int | None
) -> None:
    """Refuse an adapter whose full matrices have more than `max_values` values together."""
    keys = [key for module, key in saved.items() if module in (EMBEDDING, OUTPUT_LAYER)]
    sizes = list(accumulate(math.prod(tensors[key].shape) for key in keys))
    if max_values is None or not sizes or sizes[-1] <= max_values:
        return
    key = keys[next(index for index, size in enumerate(sizes) if size > max_values)]
    most = f"{max_values} are served here" if max_values else "this engine serves none"
    raise AdapterFormatError(
        "full_weight_too_large",
        f"{shown(key)} is a full weight: with it the adapter has {sizes[-1]} values in such; "
        f"{most}",
        field=shown(key, quote=False),
    )


def shape_error(config: PeftConfig, key: str, name: str, base: BaseModel) -> AdapterFormatError:
    """The refusal of a full weight that has not the shape of the base's tensor `name`."""
    module = name.removesuffix(".weight")
    if not is_served(module) or not is_saved(config, key, module):
        return full_weight(key)
    return AdapterFormatError(
        "shape_mismatch",
        f"{shown(key)} is to take the place of a weight of the base, which has the shape "
        f"{list(base.tensors[name].info.shape)}",
        field=shown(key, quote=False),
    )


def full_weight(key: str) -> AdapterFormatError:
    """The refusal of a fully trained weight that has no place in the engine."""
    return AdapterFormatError(
        "full_weight",
        f"{shown(key)} is a full weight that differs from the base's; only LoRA matrices are "
        "served, and the norms, `embed_tokens` and `lm_head` that `modules_to_save` names (a "
        "weight equal to the base's is ignored)",
        field=shown(key, quote=False),
    )


def without_weights(config: PeftConfig, modules: Collection[str]) -> list[str]:
    """The names of `modules_to_save` for which the file holds none of these modules."""
    return [
        name
        for name in config.modules_to_save
        if not any(_is_within(module, name) for module in modules)
    ]


def _check_complete(config: PeftConfig, saved: Mapping[str, str], base: BaseModel) -> None:
    for name in config.modules_to_save:
        wanted = [
            module
            for tensor in sorted(base.tensors)
            if is_served(module := tensor.removesuffix(".weight")) and _is_within(module, name)
        ]
        there = [module for module in wanted if module in saved]
        if there and len(there) < len(wanted):
            absent = next(module for module in wanted if module not in saved)
            raise AdapterFormatError(
                "missing_tensor",
                f"`modules_to_save` has {shown(name)}, and the file a weight of '{there[0]}' but "
                f"none of '{absent}'",
                field=absent,
            )


def _is_within(module: str, name: str) -> bool:
    parts = (*_PEFT_ROOT, *module.split("."))
    return name != "" and any(path.endswith(name) for path in accumulate(parts, "{}.{}".format))
