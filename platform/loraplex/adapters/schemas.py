"""Adapters as clients see them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from adapter_store.model_ref import MAX_VERSION
from adapter_store.registry.records import AdapterInfo, RegisteredVersion, Residency, VersionInfo


class UploadReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The version that an upload became; `unchanged` if it was there already."""

    name: str
    version: int
    digest: str
    report: Mapping[str, Any]
    """How the files were bound to the base model."""
    unchanged: bool = False


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter. `versions` counts them, `aliases` maps each alias to a version."""

    name: str
    latest_version: int
    versions: int
    aliases: dict[str, int]
    created_at: datetime
    updated_at: datetime
    residency: Residency
    """`pinned` to a slot, `warm` in host memory, or `auto`: as its use demands."""


class AdapterList(msgspec.Struct, frozen=True):
    """A tenant's adapters, by name."""

    data: list[Adapter]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable version."""

    name: str
    version: int
    digest: str
    state: str
    rank: int
    bytes: int
    aliases: list[str]
    created_at: datetime
    report: Mapping[str, Any]


class VersionList(msgspec.Struct, frozen=True):
    """An adapter's versions, newest first."""

    data: list[Version]


class ResidencyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an adapter is to be kept."""

    residency: Residency


VersionNumber = Annotated[int, Meta(ge=1, le=MAX_VERSION)]


class AliasMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an alias is to point; with `expect`, only if it points there now."""

    version: VersionNumber
    expect: VersionNumber | None = None


class Alias(msgspec.Struct, frozen=True):
    """Where an alias points, and where it did before: sending that back is the roll-back."""

    alias: str
    version: int
    previous: int | None


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
        residency=info.residency,
    )


def version(info: VersionInfo) -> Version:
    """Return a version for the client."""
    return Version(
        name=info.name,
        version=info.version,
        digest=info.digest,
        state=info.state,
        rank=info.rank,
        bytes=info.bytes,
        aliases=list(info.aliases),
        created_at=info.created_at,
        report=info.report,
    )
