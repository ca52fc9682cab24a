"""Inspect an uploaded PEFT LoRA adapter: served exactly as PEFT computes it, or refused.

Anything that cannot be served exactly raises AdapterFormatError with the name of the config field
or tensor at fault, and no tensor is left aside without being named in the report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from adapter_store.base_model import EMBEDDING, OUTPUT_LAYER, BaseModel, StoredTensor
from adapter_store.binding import Binding, BoundAdapter, bind, bind_adapter
from adapter_store.conformance import (
    BaseMatch,
    ConformanceReport,
    IgnoredTensors,
    group_modules,
    group_paths,
)
from adapter_store.digest import hash_adapter
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import PeftConfig, parse_config
from adapter_store.safetensors_header import SafetensorsHeader, TensorInfo, read_header
from adapter_store.saved_modules import count_values, full_weight, without_weights
from adapter_store.shown_text import shown
from adapter_store.tensor_scan import scan_tensor, tensors_equal

__all__ = ["Binding", "InspectedAdapter", "bind", "inspect_adapter"]

# An adapter has two tensors a module: this is room for more than 10,000 modules.
MAX_HEADER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class InspectedAdapter:
    """An adapter that can be served: identity, the config fields that count, and the report."""

    digest: str
    config: dict[str, Any]
    bindings: tuple[Binding, ...]
    biases: Mapping[str, str]
    """Keys of the biases that replace the base's, by module."""
    report: ConformanceReport
    saved: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys of the weights that replace the base's, by module: of norms and the two ends."""
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])
    """Where the weights file has each key."""


def inspect_adapter(
    config: bytes,
    weights: Path,
    base: BaseModel,
    *,
    max_rank: int,
    max_full_values: int | None = None,
) -> InspectedAdapter:
    """Check an adapter's two files against the base, down to every value of every tensor.

    `max_full_values` bounds what an own embedding and output layer have together. Reads the
    weights twice, a chunk at a time. Raises AdapterFormatError.
    """
    peft_config = parse_config(config)
    header = read_header(weights, max_header_bytes=MAX_HEADER_BYTES)
    bound = bind_adapter(peft_config, header, base, max_rank=max_rank)
    zero_keys = _scan_values(weights, header)
    _check_base_copies(weights, header, base, bound.base_copies)
    untrained = _copies_among(bound.saved, weights, header, base)
    saved = {module: key for module, key in bound.saved.items() if module not in untrained}
    full_values = count_values(saved, header.tensors, max_full_values)
    digest = hash_adapter(peft_config, weights)
    features = _features(peft_config, bound, saved)
    no_op = not {"dora", "lora_bias", "bias", "modules_to_save"} & set(features) and all(
        not zero_keys.isdisjoint((b.a_key, b.b_key)) for b in bound.bindings
    )
    report = ConformanceReport(
        digest=digest,
        bytes=header.file_size,
        rank=max(binding.rank for binding in bound.bindings),
        num_modules=len(bound.bindings),
        modules=group_modules((b.module, b.rank, b.scaling) for b in bound.bindings),
        scalings=sorted({binding.scaling for binding in bound.bindings}),
        dtypes=sorted({info.dtype for info in header.tensors.values()}),
        nesting=shown(str(bound.nesting), quote=False),
        no_op=no_op,
        base_match=_base_match(peft_config, base),
        ignored=_ignored([*bound.base_copies, *untrained.values()]),
        warnings=_warnings(peft_config, bound, no_op=no_op),
        features=features,
        full_weights=group_paths(saved),
        full_values=full_values,
    )
    return InspectedAdapter(
        digest,
        peft_config.result_fields(),
        bound.bindings,
        bound.biases,
        report,
        saved,
        header.tensors,
    )


def _features(config: PeftConfig, bound: BoundAdapter, saved: Mapping[str, str]) -> list[str]:
    modules = {binding.module for binding in bound.bindings}
    present = {
        "bias": bool(bound.biases),
        "dora": config.use_dora,
        "embedding": EMBEDDING in modules,
        "lm_head": OUTPUT_LAYER in modules,
        "lora_bias": config.lora_bias,
        "modules_to_save": bool(saved),
    }
    return [name for name, is_there in present.items() if is_there]


def _scan_values(weights: Path, header: SafetensorsHeader) -> frozenset[str]:
    zero_keys: set[str] = set()
    with weights.open("rb") as file:
        for key, info in header.tensors.items():
            scan = scan_tensor(file, info)
            if not scan.is_finite:
                raise AdapterFormatError(
                    "not_finite",
                    f"{shown(key)} has a NaN or an infinity",
                    field=shown(key, quote=False),
                )
            if scan.is_zero:
                zero_keys.add(key)
    return frozenset(zero_keys)


def _check_base_copies(
    weights: Path, header: SafetensorsHeader, base: BaseModel, copies: Mapping[str, str]
) -> None:
    with weights.open("rb") as file:
        for key, name in copies.items():
            if not _equals_base(file, header.tensors[key], base.tensors[name]):
                raise full_weight(key)


def _copies_among(
    saved: Mapping[str, str], weights: Path, header: SafetensorsHeader, base: BaseModel
) -> dict[str, str]:
    with weights.open("rb") as file:
        return {
            module: key
            for module, key in saved.items()
            if _equals_base(file, header.tensors[key], base.tensors[f"{module}.weight"])
        }


def _equals_base(file: BinaryIO, info: TensorInfo, stored: StoredTensor) -> bool:
    with stored.file.open("rb") as base_file:
        return tensors_equal(file, info, base_file, stored.info)


def _base_match(config: PeftConfig, base: BaseModel) -> BaseMatch:
    declared = config.base_model_name_or_path or None
    same_name = None if declared is None else _last_part(declared) == _last_part(base.name)
    return BaseMatch(
        name=base.name,
        fingerprint=base.fingerprint,
        declared=None if declared is None else shown(declared, quote=False),
        same_name=same_name,
    )


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def _ignored(base_copies: list[str]) -> list[IgnoredTensors]:
    if not base_copies:
        return []
    return [
        IgnoredTensors(
            reason="equal to the base's weights",
            count=len(base_copies),
            sample=shown(min(base_copies), quote=False),
        )
    ]


def _warnings(config: PeftConfig, bound: BoundAdapter, *, no_op: bool) -> list[str]:
    warnings: list[str] = []
    if no_op:
        warnings.append("every product B A is zero: the adapter answers as the base does")
    if bound.untrained:
        warnings.append(
            f"the config targets {len(bound.untrained)} modules without tensors, which stay as in "
            f"the base: '{bound.untrained[0]}' is the first"
        )
    if absent := without_weights(config, bound.saved):
        names = shown(", ".join(absent))
        warnings.append(f"`modules_to_save` names {names}; the file holds no trained weights of it")
    if not bound.nesting.is_standard:
        warnings.append(f"the keys are not nested as PEFT writes them: {shown(str(bound.nesting))}")
    return warnings
