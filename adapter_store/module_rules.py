"""Which modules a LoRA config targets, and with which rank and alpha: PEFT's own rules.

Follows `check_target_module_exists`, `_maybe_include_all_linear_layers` and `get_pattern_key` of
peft 0.21.2 (`tuners/tuners_utils.py`, `utils/other.py`).
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from adapter_store import pattern_worker
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import PeftConfig

# Without quantifiers, groups and classes a pattern takes linear time, so it needs no process.
_PLAIN = re.compile(r"[\w.-]*")
_FIRST_LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
# The worker's own limit is CPU time; this one is for a machine that gives it none.
_WALL_SECONDS = 20

_T = TypeVar("_T")
_Matches = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class _Expression:
    field: str
    mode: pattern_worker.Mode
    template: str
    pattern: str

    @property
    def full(self) -> str:
        return self.template.replace("{}", self.pattern)


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """What a config says about one module that it targets."""

    rank: int
    alpha: float


class ModuleRules:
    """The rules of one config, evaluated for a fixed set of module paths.

    `linears` are the paths that `all-linear` stands for; `names` are all paths that will be asked
    for. Raises AdapterFormatError when a pattern is not a regular expression, or takes too long.
    """

    def __init__(self, config: PeftConfig, names: Iterable[str], linears: Iterable[str]) -> None:
        self._config = config
        self._linears = frozenset(linears)
        self._target_names = _names(config.target_modules)
        self._exclude_names = _names(config.exclude_modules)
        expressions = _expressions(config)
        found = _evaluate(expressions, sorted(set(names)))
        self._matches: dict[str, list[_Matches]] = {}
        for expression, matches in zip(expressions, found, strict=True):
            self._matches.setdefault(expression.field, []).append(matches)

    def find(self, module: str) -> ModuleRule | None:
        """The rule for the module, or None if the config does not target it."""
        if self._is_excluded(module) or not self._is_targeted(module):
            return None
        config = self._config
        return ModuleRule(
            rank=self._from_pattern("rank_pattern", config.rank_pattern, module, config.r),
            alpha=self._from_pattern(
                "alpha_pattern", config.alpha_pattern, module, config.lora_alpha
            ),
        )

    def _from_pattern(self, field: str, values: Mapping[str, _T], module: str, default: _T) -> _T:
        for value, matches in zip(values.values(), self._matches.get(field, ()), strict=True):
            if module in matches:
                return value
        return default

    def _is_excluded(self, module: str) -> bool:
        return (
            _ends_with_one(module, self._exclude_names)
            or self._any_matches("exclude_modules", module)
            or self._any_matches("modules_to_save", module)
        )

    def _is_targeted(self, module: str) -> bool:
        config = self._config
        if config.targets_all_linear:
            return module in self._linears
        if isinstance(config.target_modules, str):
            return self._any_matches("target_modules", module)
        if not _ends_with_one(module, self._target_names):
            return False
        if not config.layers_to_transform:
            return True
        in_layers = self._layer_number(module) in config.layers_to_transform
        if module in config.target_modules and not in_layers:
            # PEFT takes a whole path as targeted in any layer, unless its list has 20 entries or
            # more, which it shortens to suffixes first.
            raise AdapterFormatError(
                "invalid_config",
                f"`target_modules` names '{module}', `layers_to_transform` leaves its layer out",
                field="layers_to_transform",
            )
        return in_layers

    def _any_matches(self, field: str, module: str) -> bool:
        return any(module in matches for matches in self._matches.get(field, ()))

    def _layer_number(self, module: str) -> int | None:
        if not self._config.layers_pattern:
            match = _FIRST_LAYER_NUMBER.match(module)
            return None if match is None else int(match["idx"])
        for matches in self._matches["layers_pattern"]:
            if module in matches:
                number = matches[module]
                return None if number is None else int(number)
        return None


def _names(field: str | Sequence[str]) -> frozenset[str]:
    """The names that a field lists: none where it is an expression."""
    return frozenset(() if isinstance(field, str) else field)


def _ends_with_one(module: str, names: frozenset[str]) -> bool:
    """Whether the module's path is one of the names, or ends with a dot and one of them."""
    suffix, dot = module, "."
    while dot and names:
        if suffix in names:
            return True
        _, dot, suffix = suffix.partition(".")
    return False


def _expressions(config: PeftConfig) -> list[_Expression]:
    whole = [
        _Expression(field, "fullmatch", "{}", value)
        for field, value in (
            ("target_modules", config.target_modules),
            ("exclude_modules", config.exclude_modules),
        )
        if isinstance(value, str)
        and value
        and not (field == "target_modules" and config.targets_all_linear)
    ]
    return [
        *whole,
        *(
            _Expression("modules_to_save", "match", r"(^|.*\.){}($|\..*)", value)
            for value in config.modules_to_save
        ),
        *(
            _Expression("layers_pattern", "match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.", value)
            for value in config.layers_pattern
        ),
        *(
            _Expression(field, "match", r"(.*\.)?({})$", key)
            for field in ("rank_pattern", "alpha_pattern")
            for key in getattr(config, field)
        ),
    ]


def _evaluate(expressions: Sequence[_Expression], names: list[str]) -> list[_Matches]:
    plain = [_PLAIN.fullmatch(expression.pattern) is not None for expression in expressions]
    here = [e for e, is_plain in zip(expressions, plain, strict=True) if is_plain]
    there = [e for e, is_plain in zip(expressions, plain, strict=True) if not is_plain]
    matches_here = iter(pattern_worker.match_all(_request(here, names))["matches"])
    matches_there = iter(_match_in_worker(there, names) if there else [])
    return [next(matches_here if is_plain else matches_there) for is_plain in plain]


def _request(expressions: Sequence[_Expression], names: list[str]) -> pattern_worker.Request:
    return {"expressions": [(e.mode, e.full) for e in expressions], "names": names}


def _match_in_worker(expressions: Sequence[_Expression], names: list[str]) -> list[_Matches]:
    command = [sys.executable, "-I", "-S", "-W", "ignore", str(Path(pattern_worker.__file__))]
    request = json.dumps(_request(expressions, names)).encode()
    try:
        done = subprocess.run(  # noqa: S603  (our own script; the patterns go through stdin)
            command, input=request, capture_output=True, timeout=_WALL_SECONDS, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        fields = sorted({expression.field for expression in expressions})
        raise AdapterFormatError(
            "pattern_too_slow",
            f"the patterns of {', '.join(f'`{field}`' for field in fields)} take too long to match",
            field=fields[0],
        ) from None
    response: pattern_worker.Response = json.loads(done.stdout)
    invalid = response["invalid"]
    if invalid is not None:
        raise AdapterFormatError(
            "invalid_config",
            f"a pattern of `{expressions[invalid].field}` is not a regular expression",
            field=expressions[invalid].field,
        )
    return list(response["matches"])
