"""Names: of tenants, adapters and aliases, and the `model` strings that clients send.

    name      the adapter's alias `default`
    name@N    its version N
    name:x    its alias x

Nothing here knows which names exist; the registry does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from adapter_store.errors import InvalidField, InvalidName, ModelNotFound, NameReserved

DEFAULT_ALIAS = "default"
BASE_NAME = "base"
MAX_VERSION = 2**31 - 1
MAX_TOLD = 10
"""Versions or aliases that a message names; it is told one more, where there are more."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,30}")
_VERSION = re.compile(r"[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """What a `model` string names: a version, or an alias (at most one of both is set).

    With neither set it is the alias `default`.
    """

    name: str
    version: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.name}@{self.version}"
        return self.name if self.alias is None else f"{self.name}:{self.alias}"


def parse_model_ref(text: str) -> ModelRef:
    """Read `name`, `name@N` or `name:alias`.

    Raises `ModelNotFound` for any other form, so that nobody can tell a mistyped model from one
    that does not exist.
    """
    name, at, version = text.partition("@")
    if at:
        if _NAME.fullmatch(name) and _VERSION.fullmatch(version) and int(version) <= MAX_VERSION:
            return ModelRef(name, version=int(version))
        raise model_not_found(text)
    name, colon, alias = text.partition(":")
    if not _NAME.fullmatch(name) or (colon and not _ALIAS.fullmatch(alias)):
        raise model_not_found(text)
    return ModelRef(name, alias=alias if colon else None)


def model_not_found(model: str) -> ModelNotFound:
    """The one answer for unknown, foreign and deleted adapters, and for mistyped models."""
    shown = model if len(model) <= 100 else model[:100] + "…"
    return ModelNotFound(
        f"The model {shown!r} does not exist or you do not have access to it. "
        f"`GET /v1/models` lists yours; the base is `{BASE_NAME}`."
    )


def version_not_found(ref: ModelRef, versions: Sequence[int]) -> ModelNotFound:
    """The answer for a version that an adapter of the caller's own has not; newest first."""
    told = versions_told(versions)
    return ModelNotFound(f"The adapter {ref.name!r} has no version {ref.version}; {told}.")


def versions_told(versions: Sequence[int]) -> str:
    """What is said of an adapter's versions, newest first: all that are given, or the newest."""
    *most, last = map(str, versions[:MAX_TOLD])
    if not most:
        return f"it has version {last}"
    newest = f"{', '.join(most)} and {last}"
    return f"it has versions {newest}" if len(versions) <= MAX_TOLD else f"the newest are {newest}"


def alias_not_found(ref: ModelRef, aliases: Sequence[str], newest: int) -> ModelNotFound:
    """The answer for an alias that an adapter of the caller's own has not."""
    told = ", ".join(aliases[:MAX_TOLD]) + (", …" if len(aliases) > MAX_TOLD else "")
    return ModelNotFound(
        f"The adapter {ref.name!r} has no alias {ref.alias or DEFAULT_ALIAS!r}; "
        f"{f'it has {told}' if told else 'it has none'}, and its newest version is "
        f"{ref.name}@{newest}."
    )


def check_adapter_name(name: str, reserved: frozenset[str] = frozenset()) -> None:
    """Raise `InvalidName` or `NameReserved` unless an adapter may be called `name`.

    `reserved` holds the names that the base model is served under. They are compared without case,
    so that no adapter passes for the base.
    """
    _check(
        _NAME, name, "adapter name", "1 to 64 of a-z 0-9 . _ -, with a letter or digit at each end"
    )
    if name == BASE_NAME or name in {served.casefold() for served in reserved}:
        raise NameReserved(f"the name {name!r} is kept for the base model")


def check_tenant_name(name: str) -> None:
    """Raise `InvalidName` unless a tenant may be called `name`: the form of adapter names."""
    _check(
        _NAME, name, "tenant name", "1 to 64 of a-z 0-9 . _ -, with a letter or digit at each end"
    )


def is_name(text: str) -> bool:
    """Whether an adapter or a tenant may have this name; databases refuse some other texts."""
    return _NAME.fullmatch(text) is not None


def check_page(after: str) -> None:
    """Raise `InvalidField` unless a page may begin after this name; "" is the first page."""
    if after and not is_name(after):
        raise InvalidField("after", "`after` must be the last name of the page before")


def check_version_page(after: str) -> int:
    """Return the version that a page of versions begins after; raises `InvalidField` for none."""
    if not _VERSION.fullmatch(after) or (number := int(after)) > MAX_VERSION:
        raise InvalidField("after", "`after` must be the last version of the page before")
    return number


def check_alias(alias: str) -> None:
    """Raise `InvalidName` unless an alias may be called `alias`."""
    _check(_ALIAS, alias, "alias", "a letter a-z, then up to 30 of a-z 0-9 -")


def _check(pattern: re.Pattern[str], text: str, what: str, form: str) -> None:
    if not pattern.fullmatch(text):
        shown = text if len(text) <= 100 else text[:100] + "…"
        raise InvalidName(f"{what} {shown!r} is not valid: {form}")
