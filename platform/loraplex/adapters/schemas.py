"""Adapters as clients see them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from adapter_store.model_ref import MAX_VERSION
from adapter_store.registry import records
from adapter_store.registry.records import AdapterInfo, RegisteredVersion, Residency, VersionInfo


class UploadReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The version that an upload became; `unchanged` if it was there already."""

    name: str
    version: int
    digest: str
    report: Mapping[str, Any]
    """How the files were bound to the base model."""
    unchanged: bool = False


VersionNumber = Annotated[int, Meta(ge=1, le=MAX_VERSION)]


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A second version behind an alias, and the share of its requests that get it."""

    version: VersionNumber
    share: Annotated[float, Meta(ge=0, le=1)]


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter. `versions` counts them, `aliases` maps each alias to a version."""

    name: str
    latest_version: int
    versions: int
    aliases: dict[str, int]
    created_at: datetime
    updated_at: datetime
    canaries: dict[str, Canary] = {}
    """By the alias that they are behind."""
    residency: Residency
    """`pinned` to a slot, `warm` in host memory, or `auto`: as its use demands."""


class AdapterList(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of a tenant's adapters, by name. `next` is the `after` of the next page, if any."""

    data: list[Adapter]
    next: str | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable version. `state` is `ready`, or the code with which calls of it are refused now,
    as `rank_too_large`."""

    name: str
    version: int
    digest: str
    state: str
    rank: int
    bytes: int
    aliases: list[str]
    created_at: datetime
    report: Mapping[str, Any]
    chat_template: str | None
    stop_tokens: list[str]
    defaults: Mapping[str, int | float]


class VersionList(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of an adapter's versions, newest first. `next` is the `after` of the next page, if
    any."""

    data: list[Version]
    next: str | None = None


class ResidencyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an adapter is to be kept."""

    residency: Residency


class AliasMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an alias is to point; with `expect`, only if it points there now.

    Without a `canary` there is none from now on.
    """

    version: VersionNumber
    expect: VersionNumber | None = None
    canary: Canary | None = None


class Alias(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an alias points, and where it did before: sending that back is the roll-back."""

    alias: str
    version: int
    previous: int | None
    canary: Canary | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an exported version was here."""

    name: str
    version: int
    digest: str
    rank: int
    bytes: int
    base_fingerprint: str
    created_at: datetime
    report: Mapping[str, Any]
    chat_template: str | None
    stop_tokens: list[str]
    defaults: Mapping[str, int | float]


def upload_reply(registered: RegisteredVersion) -> UploadReply:
    """Return an upload's outcome for the client."""
    return UploadReply(
        name=registered.name,
        version=registered.version,
        digest=registered.digest,
        report=registered.report,
        unchanged=not registered.created,
    )


def adapter(info: AdapterInfo) -> Adapter:
    """Return an adapter for the client."""
    return Adapter(
        name=info.name,
        latest_version=info.latest_version,
        versions=info.num_versions,
        aliases=dict(info.aliases),
        created_at=info.created_at,
        updated_at=info.updated_at,
        canaries={alias: canary(behind) for alias, behind in info.canaries.items()},
        residency=info.residency,
    )


def version(info: VersionInfo, state: str) -> Version:
    """Return a version, and how it is now, for the client."""
    return Version(
        name=info.name,
        version=info.version,
        digest=info.digest,
        state=state,
        rank=info.rank,
        bytes=info.bytes,
        aliases=list(info.aliases),
        created_at=info.created_at,
        report=info.report,
        chat_template=info.serving.chat_template,
        stop_tokens=list(info.serving.stop_tokens),
        defaults=info.serving.sampling,
    )


def canary(behind: records.Canary) -> Canary:
    """Return a canary for the client."""
    return Canary(behind.version, behind.share)


def alias(change: records.AliasChange) -> Alias:
    """Return a moved alias for the client."""
    behind = canary(change.canary) if change.canary is not None else None
    return Alias(change.alias, change.version, change.previous, behind)


def manifest(info: VersionInfo) -> Manifest:
    """Return what goes into an export."""
    return Manifest(
        name=info.name,
        version=info.version,
        digest=info.digest,
        rank=info.rank,
        bytes=info.bytes,
        base_fingerprint=info.base_fingerprint,
        created_at=info.created_at,
        report=info.report,
        chat_template=info.serving.chat_template,
        stop_tokens=list(info.serving.stop_tokens),
        defaults=info.serving.sampling,
    )
