"""Bind every tensor of a PEFT LoRA adapter to a module of the base, from the header alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adapter_store.base_model import BaseModel, LinearShape
from adapter_store.errors import AdapterFormatError
from adapter_store.module_rules import ModuleRule, ModuleRules
from adapter_store.peft_config import PeftConfig
from adapter_store.safetensors_header import SafetensorsHeader, TensorInfo, shown
from adapter_store.tensor_keys import (
    LoraKey,
    Nesting,
    base_tensor_name,
    parse_lora_key,
    unservable_reason,
)
from adapter_store.tensor_scan import SERVED_DTYPES

_SAMPLE_KEYS = 3


@dataclass(frozen=True, slots=True)
class Binding:
    """One adapted module: y += scaling * (x Aᵀ) Bᵀ.

    `module` is the path in the base, `a_key` and `b_key` name A [rank, in] and B [out, rank] in
    the safetensors file.
    """

    module: str
    rank: int
    scaling: float
    a_key: str
    b_key: str


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """Every tensor of an adapter, accounted for.

    `bindings` are ordered by layer and name. `base_copies` maps the keys of full weights to the
    tensor of the base that they repeat; the header shows their shape only, so whoever has the file
    must compare the values. `untrained` are modules that the config targets and that have no
    tensors: PEFT leaves those as they are in the base.
    """

    bindings: tuple[Binding, ...]
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
    lora_keys, base_copies = _sort_keys(header, base)
    nesting = _common_nesting(lora_keys)
    pairs = _pair(lora_keys)
    rules = _Rules(config, base, nesting)
    bindings: list[Binding] = []
    for module in sorted(pairs, key=_layer_order):
        a_key, b_key = pairs[module]
        rule = rules.require(module, a_key)
        a, b = header.tensors[a_key], header.tensors[b_key]
        _check_shapes(base.linears[module], rule.rank, (a_key, a), (b_key, b))
        divisor = math.sqrt(rule.rank) if config.use_rslora else rule.rank
        bindings.append(Binding(module, rule.rank, rule.alpha / divisor, a_key, b_key))
    largest = max(bindings, key=lambda binding: binding.rank)
    if largest.rank > max_rank:
        raise AdapterFormatError(
            "rank_too_large",
            f"'{largest.module}' has rank {largest.rank}; at most {max_rank} is served",
            field="rank_pattern" if largest.rank != config.r else "r",
        )
    untrained = rules.untrained(pairs)
    if untrained and not config.resets_to_zero:
        raise AdapterFormatError(
            "missing_tensor",
            f"the config targets '{untrained[0]}', the file has no tensors for it, and "
            "`init_lora_weights` makes PEFT start it at random",
            field=untrained[0],
        )
    return BoundAdapter(tuple(bindings), nesting, base_copies, untrained)


class _Rules:
    """The config's rules, asked by the path in the base.

    An unusual nesting leaves two readings of the config's patterns: against the paths in the file,
    which the trained model had, and against those of the base. They must not contradict.
    """

    def __init__(self, config: PeftConfig, base: BaseModel, nesting: Nesting) -> None:
        self._trained_path = {module: nesting.trained_path(module) for module in base.linears}
        self._linears = tuple(base.linears)
        trained = self._trained_path.values()
        self._rules = ModuleRules(
            config,
            names=(*base.linears, *base.other_modules, *trained),
            linears=(*base.linears, *trained),
        )
        for module in sorted(base.other_modules):
            if self._rules.find(module) is not None:
                raise AdapterFormatError(
                    "unsupported_module",
                    f"`target_modules` matches '{module}', which is not a linear of a decoder "
                    "layer; only those are served",
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

    def untrained(self, trained: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
        return tuple(
            module
            for module in self._linears
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


def _sort_keys(header: SafetensorsHeader, base: BaseModel) -> tuple[list[LoraKey], dict[str, str]]:
    lora_keys: list[LoraKey] = []
    base_copies: dict[str, str] = {}
    foreign: list[str] = []
    for key, info in header.tensors.items():
        lora_key = parse_lora_key(key)
        base_name = base_tensor_name(key)
        if lora_key is not None and lora_key.module in base.linears:
            lora_keys.append(lora_key)
        elif base_name in base.tensors:
            if info.shape != base.tensors[base_name].info.shape:
                raise full_weight(key)
            base_copies[key] = base_name
        elif lora_key is None and (reason := unservable_reason(key)) is not None:
            raise AdapterFormatError(
                "unsupported_tensor",
                f"{shown(key)} cannot be served: {reason}",
                field=shown(key, quote=False),
            )
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


def full_weight(key: str) -> AdapterFormatError:
    """The refusal of a fully trained weight."""
    return AdapterFormatError(
        "full_weight",
        f"{shown(key)} is a full weight that differs from the base's; only LoRA matrices are "
        "served (a weight equal to the base's is ignored)",
        field=shown(key, quote=False),
    )


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


def _pair(lora_keys: Sequence[LoraKey]) -> dict[str, tuple[str, str]]:
    """A and B of each module; with one nesting, no two keys can be the same matrix."""
    sides: dict[str, dict[str, str]] = {}
    for lora_key in lora_keys:
        sides.setdefault(lora_key.module, {})[lora_key.side] = lora_key.key
    for module, keys in sides.items():
        if len(keys) != 2:
            (side, key), *_ = keys.items()
            missing = "B" if side == "A" else "A"
            raise AdapterFormatError(
                "missing_tensor",
                f"'{module}' has lora_{side} and no lora_{missing}",
                field=shown(key, quote=False),
            )
    return {module: (keys["A"], keys["B"]) for module, keys in sides.items()}


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
    return int(module.split(".")[2]), module


def _samples(keys: Sequence[str] | Mapping[str, str]) -> str:
    return ", ".join(shown(key) for key in list(keys)[:_SAMPLE_KEYS])
