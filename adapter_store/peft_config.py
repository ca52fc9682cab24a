"""`adapter_config.json`: which fields change the result, which do not, and which are refused.

Covers every field of peft's `LoraConfig` from 0.19 to 0.21.2. A field with `null` counts as absent,
as does an unknown field that holds nothing; an unknown field that holds something is refused.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from adapter_store.errors import AdapterFormatError
from adapter_store.json_words import in_json_words
from adapter_store.shown_text import shown
from adapter_store.unique_names import RepeatedName, load_unique

MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 2048
MAX_PATTERN_LENGTH = 2000
_MAX_ALPHA = 3.4e38
"""A rank is 1 at least, so no scaling is larger; beyond it all outputs would be NaN."""

_NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "init_lora_weights",  # classified by its value in `_check_init`
        "lora_dropout",  # training only
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",  # read with use_qalora only
        "revision",
        "runtime_config",  # PEFT drops it on loading
        "task_type",
        # How training began; `init_lora_weights` says whether that still matters.
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        # Learning rates that ms-swift writes into the file.
        "lorap_emb_lr",
        "lorap_lr_ratio",
    }
)
_UNSUPPORTED: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA is not served",
    "arrow_config": "Arrow routing is not served",
    "fan_in_fan_out": "weights stored as (in, out) are not served",
    "kasa_config": "KaSA changes the base weights",
    "layer_replication": "the base model's layers are fixed",
    "megatron_config": "Megatron layers are not served",
    "monteclora_config": "MonteCLoRA is not served",
    "target_parameters": "only linear modules can be targeted",
    "trainable_token_indices": "trained embedding rows are not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "use_qalora": "QALoRA is not served",
    "velora_config": "VeLoRA is not served",
}
# These leave the base as it is: PEFT starts from the same base when it loads the adapter.
_INITS_ON_THE_BASE = ("eva", "gaussian", "mica", "orthogonal")
_INITS_THAT_CHANGE_THE_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")

_Names = str | list[str]
_Rank = Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]


class _RawConfig(msgspec.Struct, frozen=True):
    r: _Rank = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    target_modules: _Names | None = None
    exclude_modules: _Names | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: _Names | None = None
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None
    base_model_name_or_path: str | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    use_dora: bool = False
    ensure_weight_tying: bool = False


class PeftConfig(msgspec.Struct, frozen=True):
    """The fields of a LoRA config that decide the result; the others have been checked.

    Text in `target_modules` and `exclude_modules` is a regular expression for whole module paths,
    or `all-linear`; a tuple (sorted) holds paths or their ends. `rank_pattern` and `alpha_pattern`
    keep the order of the file, since the first that matches counts. `resets_to_zero` says whether
    PEFT leaves a targeted module without tensors as it was in the base. `bias` is about the biases
    of the base, `lora_bias` about one that follows B.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    modules_to_save: tuple[str, ...]
    bias: Literal["none", "all", "lora_only"]
    lora_bias: bool
    use_dora: bool
    ensure_weight_tying: bool
    resets_to_zero: bool
    base_model_name_or_path: str | None

    @property
    def targets_all_linear(self) -> bool:
        """Whether `target_modules` is PEFT's short word for every linear of the decoder layers."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def result_fields(self) -> dict[str, Any]:
        """The fields that change the result, with defaults filled in and as plain JSON values."""
        plain = {
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "use_rslora": self.use_rslora,
            "target_modules": "all-linear" if self.targets_all_linear else self.target_modules,
            "exclude_modules": self.exclude_modules,
            "layers_to_transform": self.layers_to_transform,
            "layers_pattern": self.layers_pattern,
            "rank_pattern": [list(item) for item in self.rank_pattern.items()],
            "alpha_pattern": [list(item) for item in self.alpha_pattern.items()],
            "modules_to_save": self.modules_to_save,
        }
        # Only where they are set: digests from before they were served stay.
        later = {"bias": self.bias, "lora_bias": self.lora_bias, "use_dora": self.use_dora}
        plain |= {key: value for key, value in later.items() if value not in ("none", False)}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in plain.items()}

    def canonical_json(self) -> bytes:
        """`result_fields` as one sequence of bytes: sorted keys, no spaces, ASCII."""
        return json.dumps(self.result_fields(), sort_keys=True, separators=(",", ":")).encode()


def parse_config(raw: bytes) -> PeftConfig:
    """Parse `adapter_config.json`; raises AdapterFormatError with the field's name."""
    fields = _load_json(raw)
    _check_fields(fields)
    present = {
        key: value
        for key, value in fields.items()
        if value is not None or key in ("r", "lora_alpha")
    }
    try:
        config = msgspec.convert(present, _RawConfig)
    except (msgspec.ValidationError, OverflowError) as error:
        reason, _, path = in_json_words(str(error)).partition(" - at `$")
        name = re.match(r"\.?(\w+)", path)
        field = name[1] if name else None
        raise _invalid_value(field, f"`{field}` in adapter_config.json: {reason}") from None
    resets_to_zero = _check_init(fields.get("init_lora_weights", True))
    _check_values(config)
    return PeftConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        target_modules=_names(config.target_modules),
        exclude_modules=_names(config.exclude_modules),
        layers_to_transform=_layer_numbers(config.layers_to_transform),
        layers_pattern=_as_tuple(config.layers_pattern),
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
        modules_to_save=tuple(sorted(set(config.modules_to_save or ()))),
        bias=config.bias,
        lora_bias=config.lora_bias,
        use_dora=config.use_dora,
        ensure_weight_tying=config.ensure_weight_tying,
        resets_to_zero=resets_to_zero,
        base_model_name_or_path=config.base_model_name_or_path,
    )


def _load_json(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterFormatError(
            "config_too_large",
            f"adapter_config.json has {len(raw)} bytes, at most {MAX_CONFIG_BYTES} are read",
        )
    try:
        fields: Any = load_unique(raw)
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except RepeatedName as error:
        raise AdapterFormatError(
            "invalid_config",
            f"adapter_config.json has the field {shown(error.name)} twice",
            field=shown(error.name, quote=False),
        ) from None
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(
            "invalid_config", f"adapter_config.json is not valid JSON ({type(error).__name__})"
        ) from None
    if not isinstance(fields, dict):
        raise AdapterFormatError("invalid_config", "adapter_config.json is not a JSON object")
    return fields


def _check_fields(fields: Mapping[str, Any]) -> None:
    peft_type = fields.get("peft_type")
    if peft_type != "LORA":
        raise AdapterFormatError(
            "unsupported_peft_type",
            f"`peft_type` must be LORA, not {shown(str(peft_type), quote=False)}",
            field="peft_type",
        )
    for key, value in fields.items():
        if key in _RawConfig.__struct_fields__ or key in _NEUTRAL:
            continue
        if key in _UNSUPPORTED:
            if not _is_empty(value):
                raise _unsupported(key, f"`{key}` is set: {_UNSUPPORTED[key]}")
        elif not _is_empty(value):
            raise _unsupported(
                shown(key, quote=False), f"the field {shown(key)} is not known and might matter"
            )


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _check_init(init: Any) -> bool:
    """Return whether PEFT gives a targeted module without tensors a product B A of zero."""
    if init is None or isinstance(init, bool):
        return init is True  # otherwise PEFT draws A and B at random
    name = init.lower() if isinstance(init, str) else ""
    if name in _INITS_ON_THE_BASE:
        return name != "orthogonal"
    if name.startswith(_INITS_THAT_CHANGE_THE_BASE):
        raise _unsupported(
            "init_lora_weights",
            f"`init_lora_weights` is {shown(name)}, which trains on changed base weights; convert "
            "the adapter with `path_initial_model_for_weight_conversion` of PEFT's save_pretrained",
        )
    raise _invalid_value(
        "init_lora_weights", f"`init_lora_weights` is {shown(str(init))}, which PEFT does not know"
    )


def _check_values(config: _RawConfig) -> None:
    if config.target_modules is None:
        raise _invalid_value("target_modules", "adapter_config.json has no `target_modules`")
    if isinstance(config.target_modules, str) and (
        _layer_numbers(config.layers_to_transform) or config.layers_pattern
    ):
        raise _invalid_value(
            "layers_to_transform",
            "PEFT takes no `layers_to_transform` or `layers_pattern` when `target_modules` is text",
        )
    if config.use_dora and config.lora_bias:
        raise _unsupported(
            "lora_bias", "`lora_bias` and `use_dora` together: PEFT adds the bias to the weights"
        )
    if config.layers_pattern and config.layers_to_transform is None:
        raise _invalid_value(
            "layers_pattern", "PEFT takes no `layers_pattern` without `layers_to_transform`"
        )
    if config.lora_alpha == 0:
        raise _invalid_value("lora_alpha", "`lora_alpha` is 0: the adapter would do nothing")
    for key, alpha in config.alpha_pattern.items():
        if alpha == 0:
            raise _invalid_value("alpha_pattern", f"`alpha_pattern` has 0 for {shown(key)}")
    fields = {"lora_alpha": (config.lora_alpha,), "alpha_pattern": config.alpha_pattern.values()}
    for field, alphas in fields.items():
        if not all(abs(alpha) <= _MAX_ALPHA for alpha in alphas):
            raise _invalid_value(field, f"`{field}` is beyond what a 32-bit float can hold")
    _check_patterns(config)


def _check_patterns(config: _RawConfig) -> None:
    patterns: dict[str, list[str]] = {
        "rank_pattern": list(config.rank_pattern),
        "alpha_pattern": list(config.alpha_pattern),
        "modules_to_save": list(config.modules_to_save or ()),
        "layers_pattern": list(_as_tuple(config.layers_pattern)),
    }
    for field in ("target_modules", "exclude_modules"):
        value: _Names | None = getattr(config, field)
        patterns[field] = [value] if isinstance(value, str) else []
    if sum(map(len, patterns.values())) > MAX_PATTERNS:
        field = max(patterns, key=lambda name: len(patterns[name]))
        raise _invalid_value(field, f"the config has more than {MAX_PATTERNS} patterns")
    for field, values in patterns.items():
        if any(len(value) > MAX_PATTERN_LENGTH for value in values):
            raise _invalid_value(
                field, f"a pattern of `{field}` is longer than {MAX_PATTERN_LENGTH} characters"
            )


def _names(value: _Names | None) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(sorted(set(value or ())))


def _as_tuple(value: _Names | None) -> tuple[str, ...]:
    if not value:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _layer_numbers(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(sorted(set(value)))


def _unsupported(field: str, message: str) -> AdapterFormatError:
    return AdapterFormatError("unsupported_field", message, field=field)


def _invalid_value(field: str | None, message: str) -> AdapterFormatError:
    return AdapterFormatError("invalid_config", message, field=field)
