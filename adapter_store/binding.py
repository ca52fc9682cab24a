"""Bind every tensor of a PEFT LoRA adapter to a module of the base, from the header alone."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from adapter_store.base_model import EMBEDDING, OUTPUT_LAYER, BaseModel, LinearShape
from adapter_store.errors import AdapterFormatError
from adapter_store.module_rules import ModuleRule, ModuleRules
from adapter_store.peft_config import PeftConfig
from adapter_store.safetensors_header import SafetensorsHeader, TensorInfo
from adapter_store.saved_modules import shape_error, take_saved
from adapter_store.shown_text import shown
from adapter_store.tensor_keys import (
    LoraKey,
    Nesting,
    Part,
    base_tensor_name,
    parse_lora_key,
    unservable_reason,
)
from adapter_store.tensor_scan import SERVED_DTYPES

_SAMPLE_KEYS = 3
_NAMES: Mapping[Part, str] = {
    "A": "lora_A",
    "B": "lora_B",
    "B_bias": "a bias of lora_B",
    "embedding_A": "lora_embedding_A",
    "embedding_B": "lora_embedding_B",
    "magnitude": "DoRA's lora_magnitude_vector",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """One adapted module: y += scaling * (x Aᵀ) Bᵀ.

    `module` is the path in the base, `a_key` and `b_key` name A [rank, in] and B [out, rank] in
    the safetensors file. For the embedding, x is the one-hot row of a token. `b_bias_key` names a
    bias [out] that is added to x Aᵀ Bᵀ, `magnitude_key` DoRA's norm [out] of each output's weights.
    """

    module: str
    rank: int
    scaling: float
    a_key: str
    b_key: str
    b_bias_key: str | None = None
    magnitude_key: str | None = None


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """Every tensor of an adapter, accounted for.

    `bindings` are ordered by layer and name. `biases` maps modules to the keys of biases that
    replace the base's, `saved` to the keys of weights that do. `base_copies` maps the keys of full
    weights to the tensor of the base that they repeat; the header shows their shape only, so
    whoever has the file must compare the values. `untrained` are modules that the config targets
    and that have no tensors: PEFT leaves those as they are in the base.
    """

    bindings: tuple[Binding, ...]
    biases: Mapping[str, str]
    saved: Mapping[str, str]
    nesting: Nesting
    base_copies: Mapping[str, str]
    untrained: tuple[str, ...]


def bind(
    config: PeftConfig, header: SafetensorsHeader, base: BaseModel, *, max_rank: int
) -> tuple[Binding, ...]:
    """Bind the adapter's tensors to modules of the base, at least one.

    Raises AdapterFormatError naming the field or the tensor that cannot be served exactly.
    """
    return bind_adapter(config, header, base, max_rank=max_rank).bindings


def bind_adapter(
    config: PeftConfig, header: SafetensorsHeader, base: BaseModel, *, max_rank: int
) -> BoundAdapter:
    """As `bind`, with an account of the tensors and modules that are not bound."""
    if not header.tensors:
        raise AdapterFormatError("no_tensors", "the weights file has no tensors")
    _check_dtypes(header)
    lora_keys, base_copies = _sort_keys(config, header, base)
    nesting = _common_nesting(lora_keys)
    parts = _gather_parts(lora_keys)
    rules = _Rules(config, base, nesting)
    shapes = {**base.linears, **base.ends}
    bindings: list[Binding] = []
    for module in sorted(parts, key=_layer_order):
        a_key, b_key, *extra_keys = _check_parts(config, module, parts[module])
        rule = rules.require(module, a_key)
        a, b = header.tensors[a_key], header.tensors[b_key]
        shape = shapes[module]
        _check_shapes(shape, rule.rank, (a_key, a), (b_key, b))
        for key in extra_keys:
            if key is not None:
                _check_vector(key, header.tensors[key], shape.out_features)
        divisor = math.sqrt(rule.rank) if config.use_rslora else rule.rank
        scaling = rule.alpha / divisor
        bindings.append(Binding(module, rule.rank, scaling, a_key, b_key, *extra_keys))
    biases = _take_biases(config, base_copies, base, rules)
    saved = take_saved(config, base_copies, base, parts)
    largest = max(bindings, key=lambda binding: binding.rank)
    if largest.rank > max_rank:
        raise AdapterFormatError(
            "rank_too_large",
            f"'{largest.module}' has rank {largest.rank}; at most {max_rank} is served",
            field="rank_pattern" if largest.rank != config.r else "r",
        )
    untrained = rules.untrained(parts)
    if untrained and not config.resets_to_zero:
        raise AdapterFormatError(
            "missing_tensor",
            f"the config targets '{untrained[0]}', the file has no tensors for it, and "
            "`init_lora_weights` makes PEFT start it at random",
            field=untrained[0],
        )
    return BoundAdapter(tuple(bindings), biases, saved, nesting, base_copies, untrained)


class _Rules:
    """The config's rules, asked by the path in the base.

    An unusual nesting leaves two readings of the config's patterns: against the paths in the file,
    which the trained model had, and against those of the base. They must not contradict.
    """

    def __init__(self, config: PeftConfig, base: BaseModel, nesting: Nesting) -> None:
        self._modules = (*base.linears, *base.ends)
        self._trained_path = {module: nesting.trained_path(module) for module in self._modules}
        self._rules = ModuleRules(
            config,
            names=(*self._modules, *base.other_modules, *self._trained_path.values()),
            linears=(*base.linears, *(self._trained_path[module] for module in base.linears)),
        )
        for module in sorted(base.other_modules):
            if self._rules.find(module) is not None:
                raise AdapterFormatError(
                    "unsupported_module",
                    f"`target_modules` matches '{module}', which is neither a linear nor the "
                    "embedding; only those are served",
                    field="target_modules",
                )

    def find(self, module: str, key: str | None = None) -> ModuleRule | None:
        readings = {
            rule
            for path in (self._trained_path[module], module)
            if (rule := self._rules.find(path)) is not None
        }
        if len(readings) > 1:
            raise AdapterFormatError(
                "ambiguous_nesting",
                f"`rank_pattern` or `alpha_pattern` gives '{module}' and "
                f"'{self._trained_path[module]}' different values",
                field=key or module,
            )
        return next(iter(readings), None)

    def require(self, module: str, key: str) -> ModuleRule:
        rule = self.find(module, key)
        if rule is None:
            raise AdapterFormatError(
                "untargeted_tensor",
                f"{shown(key)} is for a module that the config does not target, so PEFT would "
                "leave it out",
                field=shown(key, quote=False),
            )
        return rule

    def untrained(self, trained: Collection[str]) -> tuple[str, ...]:
        return tuple(
            module
            for module in self._modules
            if module not in trained and self.find(module) is not None
        )


def _check_dtypes(header: SafetensorsHeader) -> None:
    for key, info in header.tensors.items():
        if info.dtype not in SERVED_DTYPES:
            raise AdapterFormatError(
                "unsupported_dtype",
                f"{shown(key)} is {info.dtype}; {', '.join(SERVED_DTYPES)} are served",
                field=shown(key, quote=False),
            )


def _sort_keys(
    config: PeftConfig, header: SafetensorsHeader, base: BaseModel
) -> tuple[list[LoraKey], dict[str, str]]:
    lora_keys: list[LoraKey] = []
    base_copies: dict[str, str] = {}
    foreign: list[str] = []
    for key, info in header.tensors.items():
        lora_key = parse_lora_key(key)
        base_name = base_tensor_name(key)
        if lora_key is not None and _has_place(lora_key, base):
            lora_keys.append(lora_key)
        elif base_name in base.tensors:
            if info.shape != base.tensors[base_name].info.shape:
                raise shape_error(config, key, base_name, base)
            base_copies[key] = base_name
        elif lora_key is None and (reason := unservable_reason(key)) is not None:
            raise _unsupported_tensor(key, reason)
        else:
            foreign.append(key)
    if foreign:
        raise AdapterFormatError(
            "foreign_tensor",
            f"{len(foreign)} tensors fit no module of {base.name}, which has modules such as "
            f"'{next(iter(base.linears))}': {_samples(foreign)}",
            field=shown(foreign[0], quote=False),
        )
    if not lora_keys:
        raise AdapterFormatError(
            "no_modules_bound",
            f"no tensor is a LoRA matrix of a module of {base.name}: {_samples(base_copies)}",
        )
    return lora_keys, base_copies


def _common_nesting(lora_keys: Sequence[LoraKey]) -> Nesting:
    first = lora_keys[0]
    for lora_key in lora_keys:
        if lora_key.nesting != first.nesting:
            raise AdapterFormatError(
                "ambiguous_nesting",
                f"the keys are nested in two ways: {_samples([first.key, lora_key.key])}",
                field=shown(lora_key.key, quote=False),
            )
    return first.nesting


def _has_place(lora_key: LoraKey, base: BaseModel) -> bool:
    if lora_key.module == EMBEDDING:
        return EMBEDDING in base.ends and lora_key.part in ("embedding_A", "embedding_B")
    is_linear = lora_key.module in base.linears or lora_key.module in base.ends
    return is_linear and lora_key.part in ("A", "B", "B_bias", "magnitude")


def _gather_parts(lora_keys: Sequence[LoraKey]) -> dict[str, dict[Part, str]]:
    """The key of each part of each module."""
    parts: dict[str, dict[Part, str]] = {}
    for lora_key in lora_keys:
        keys = parts.setdefault(lora_key.module, {})
        if lora_key.part in keys:
            raise _unsupported_tensor(lora_key.key, f"{shown(keys[lora_key.part])} is the same")
        keys[lora_key.part] = lora_key.key
    return parts


def _check_parts(
    config: PeftConfig, module: str, keys: Mapping[Part, str]
) -> tuple[str, str, str | None, str | None]:
    """The keys of A, of B, and of B's bias and DoRA's magnitude where the config has them."""
    pair: tuple[Part, Part] = ("A", "B")
    if module == EMBEDDING:
        pair = ("embedding_A", "embedding_B")
    is_end = module in (EMBEDDING, OUTPUT_LAYER)
    if is_end and (field := _end_conflict(config, module)) is not None:
        raise AdapterFormatError(
            "unsupported_field", f"`{field}` is not served for '{module}'", field=field
        )
    wanted: dict[Part, bool] = {
        pair[0]: True,
        pair[1]: True,
        "B_bias": config.lora_bias,
        "magnitude": config.use_dora,
    }
    some_key = next(iter(keys.values()))
    for part, is_wanted in wanted.items():
        if is_wanted and part not in keys:
            there = ", ".join(_NAMES[part] for part in keys)
            raise AdapterFormatError(
                "missing_tensor",
                f"'{module}' has {there} and no {_NAMES[part]}",
                field=shown(some_key, quote=False),
            )
        if not is_wanted and part in keys:
            field = "lora_bias" if part == "B_bias" else "use_dora"
            raise _unsupported_tensor(
                keys[part], f"it is {_NAMES[part]}, and `{field}` is not set in the config"
            )
    return keys[pair[0]], keys[pair[1]], keys.get("B_bias"), keys.get("magnitude")


def _end_conflict(config: PeftConfig, module: str) -> str | None:
    """The field that makes PEFT do more at the embedding or the output layer than is served."""
    if config.ensure_weight_tying:
        return "ensure_weight_tying"
    if config.use_dora:
        return "use_dora"
    return "lora_bias" if config.lora_bias and module == EMBEDDING else None


def _take_biases(
    config: PeftConfig, base_copies: dict[str, str], base: BaseModel, rules: "_Rules"
) -> dict[str, str]:
    """Move the base's biases from the copies to those that the adapter brings, by module."""
    if config.bias == "none":
        return {}
    biases: dict[str, str] = {}
    for key, name in list(base_copies.items()):
        module, _, kind = name.rpartition(".")
        if kind != "bias" or module not in base.linears:
            continue
        is_targeted = rules.find(module) is not None
        if is_targeted != (".base_layer." in key) or (
            config.bias == "lora_only" and not is_targeted
        ):
            raise AdapterFormatError(
                "untargeted_tensor",
                f"{shown(key)} is a bias that PEFT would leave out, given the config's targets",
                field=shown(key, quote=False),
            )
        if module in biases:
            raise _unsupported_tensor(key, f"{shown(biases[module])} is the same")
        biases[module] = key
        del base_copies[key]
    return biases


def _check_vector(key: str, info: TensorInfo, size: int) -> None:
    if info.shape != (size,):
        raise AdapterFormatError(
            "shape_mismatch",
            f"{shown(key)} has the shape {list(info.shape)}, not {[size]}",
            field=shown(key, quote=False),
        )


def _unsupported_tensor(key: str, reason: str) -> AdapterFormatError:
    return AdapterFormatError(
        "unsupported_tensor",
        f"{shown(key)} cannot be served: {reason}",
        field=shown(key, quote=False),
    )


def _check_shapes(
    linear: LinearShape, rank: int, a: tuple[str, TensorInfo], b: tuple[str, TensorInfo]
) -> None:
    wanted = {a: (rank, linear.in_features), b: (linear.out_features, rank)}
    for ((key, info), shape), rank_axis in zip(wanted.items(), (0, 1), strict=True):
        if info.shape == shape:
            continue
        other_axis = 1 - rank_axis
        if len(info.shape) == 2 and info.shape[other_axis] == shape[other_axis]:
            code = "rank_mismatch"
            reason = f"the config gives it rank {rank}"
        else:
            code = "shape_mismatch"
            reason = f"the base's module takes {linear.in_features} → {linear.out_features}"
        raise AdapterFormatError(
            code,
            f"{shown(key)} has the shape {list(info.shape)}, not {list(shape)}: {reason}",
            field=shown(key, quote=False),
        )


def _layer_order(module: str) -> tuple[int, str]:
    """The embedding comes before all layers, the output layer after them."""
    if module in (EMBEDDING, OUTPUT_LAYER):
        return (-1 if module == EMBEDDING else 1 << 30), module
    return int(module.split(".")[2]), module


def _samples(keys: Sequence[str] | Mapping[str, str]) -> str:
    return ", ".join(shown(key) for key in list(keys)[:_SAMPLE_KEYS])
