"""`modules_to_save`: modules of which an adapter brings the whole weight, in place of the base's.

PEFT saves such a weight under the key that it has in the trained model. What is served: the norms
of the residual stream, the embedding and the output layer. Follows `_set_trainable` and
`ModulesToSaveWrapper` of peft 0.21.2 (`utils/other.py`): a name matches every module whose path
ends with it, in the middle of a word too, and a module that is matched brings all within it.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate

from adapter_store.base_model import EMBEDDING, OUTPUT_LAYER, BaseModel
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import PeftConfig
from adapter_store.safetensors_header import TensorInfo
from adapter_store.shown_text import shown

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
    wanted = _wanted_modules(config, base)
    for key, name in list(base_copies.items()):
        module = name.removesuffix(".weight")
        if module not in wanted or _is_of_a_base_layer(key):
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
    _check_complete(config, saved, wanted)
    return saved


def is_served(module: str) -> bool:
    """Whether a module's whole weight can be an adapter's own."""
    return module in (EMBEDDING, OUTPUT_LAYER) or _NORM.fullmatch(module) is not None


def count_values(
    saved: Mapping[str, str], tensors: Mapping[str, TensorInfo], max_values: int | None
) -> int:
    """How many values an adapter's full matrices have together; refused if above `max_values`."""
    keys = [key for module, key in saved.items() if module in (EMBEDDING, OUTPUT_LAYER)]
    sizes = list(accumulate(math.prod(tensors[key].shape) for key in keys))
    total = sizes[-1] if sizes else 0
    if max_values is None or total <= max_values:
        return total
    key = keys[next(index for index, size in enumerate(sizes) if size > max_values)]
    most = f"{max_values} are served here" if max_values else "this engine serves none"
    raise AdapterFormatError(
        "full_weight_too_large",
        f"{shown(key)} is a full weight: with it the adapter has {total} values in such; {most}",
        field=shown(key, quote=False),
    )


def shape_error(config: PeftConfig, key: str, name: str, base: BaseModel) -> AdapterFormatError:
    """The refusal of a full weight that has not the shape of the base's tensor `name`."""
    module = name.removesuffix(".weight")
    if _is_of_a_base_layer(key) or module not in _wanted_modules(config, base):
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
    paths = _by_path(modules)
    return [name for name in config.modules_to_save if _find(paths, name) is None]


def _wanted_modules(config: PeftConfig, base: BaseModel) -> dict[str, None]:
    """Modules of the base that PEFT looks for in the file, of those that are served; sorted."""
    # There may be thousands of names, and of keys. So all names are compared at once, and with the
    # base's modules: not with each key of the file.
    names = tuple(filter(None, config.modules_to_save))
    served = filter(is_served, (name.removesuffix(".weight") for name in sorted(base.tensors)))
    return {
        module: None for module in served if any(path.endswith(names) for path in _paths(module))
    }


def _check_complete(config: PeftConfig, saved: Mapping[str, str], wanted: Collection[str]) -> None:
    there = _by_path(module for module in wanted if module in saved)
    absent = _by_path(module for module in wanted if module not in saved)
    if not there or not absent:
        return
    for name in config.modules_to_save:
        one, other = _find(there, name), _find(absent, name)
        if one is not None and other is not None:
            raise AdapterFormatError(
                "missing_tensor",
                f"`modules_to_save` has {shown(name)}, and the file a weight of '{one}' but none "
                f"of '{other}'",
                field=other,
            )


def _is_of_a_base_layer(key: str) -> bool:
    """Whether it is what LoRA wraps, which PEFT never replaces."""
    return ".base_layer." in key


def _paths(module: str) -> Iterable[str]:
    """A module's path in PEFT's model, after those of all that it lies in."""
    return accumulate((*_PEFT_ROOT, *module.split(".")), "{}.{}".format)


def _by_path(modules: Iterable[str]) -> dict[str, str]:
    """The first of the modules at, or within, each path."""
    found: dict[str, str] = {}
    for module in modules:
        for path in _paths(module):
            found.setdefault(path, module)
    return found


def _find(modules: Mapping[str, str], name: str) -> str | None:
    if not name:
        return None  # PEFT would take every module
    return next((module for path, module in modules.items() if path.endswith(name)), None)
