"""References to adapters: `hf://org/name@revision`, `s3://bucket/prefix`, `file:///folder`.

Read strictly: what could mean two things to two readers (`..`, percent signs, backslashes,
look-alike letters, control characters) is refused before anything is looked up.
"""

import re
from dataclasses import dataclass

from adapter_store.blob_url import BUCKET
from adapter_store.errors import SourceError

MAX_SOURCE_CHARS = 1024

_HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"hf://({_HUB_NAME}/{_HUB_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?")
_S3 = re.compile(r"s3://([^/?]+)(?:/([^?]*))?(?:\?region=([a-z0-9-]{1,32}))?")
_KEY_PART = re.compile(r"[A-Za-z0-9!_.*'()=+@,:-]{1,255}")
_ALIAS_SUFFIXES = ("-s3alias", "--ol-s3")
"""Other names for a bucket, which could be the blob store's."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository of the hub, at a branch, tag or commit."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"hf://{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class S3Reference:
    """A folder of a bucket; `prefix` has no slash at its ends and may be empty."""

    bucket: str
    prefix: str
    region: str | None = None

    def __str__(self) -> str:
        region = "" if self.region is None else f"?region={self.region}"
        return f"s3://{self.bucket}/{self.prefix}{region}"


@dataclass(frozen=True, slots=True)
class FileReference:
    """An absolute path of a folder on the service's own machine."""

    path: str

    def __str__(self) -> str:
        return f"file://{self.path}"


Reference = HubReference | S3Reference | FileReference


def parse_reference(text: str) -> Reference:
    """Read a reference; raises `SourceError` (`invalid_source`)."""
    if len(text) > MAX_SOURCE_CHARS:
        raise _invalid(f"`source` has {len(text)} characters; at most {MAX_SOURCE_CHARS}")
    scheme, _, rest = text.partition("://")
    match scheme:
        case "hf":
            return _hub(text)
        case "s3":
            return _s3(text)
        case "file":
            return _file(rest)
        case _:
            raise _invalid(
                "`source` must be hf://org/name@revision, s3://bucket/prefix or file:///folder"
            )


def _hub(text: str) -> HubReference:
    found = _HUB.fullmatch(text)
    if found is None or _climbs(text) or "//" in (found[2] or ""):
        raise _invalid("`source` must be like hf://org/name or hf://org/name@revision")
    return HubReference(found[1], found[2] or "main")


def _s3(text: str) -> S3Reference:
    found = _S3.fullmatch(text)
    if found is None or not BUCKET.fullmatch(found[1]) or found[1].endswith(_ALIAS_SUFFIXES):
        raise _invalid("`source` must be like s3://bucket/prefix or s3://bucket/prefix?region=name")
    prefix = (found[2] or "").removesuffix("/")
    if prefix and (_climbs(prefix) or not all(map(_KEY_PART.fullmatch, prefix.split("/")))):
        raise _invalid(
            "the prefix of an s3:// source may have letters, digits and !_.*'()=+@,:- between "
            "single slashes, and no part `.` or `..`"
        )
    return S3Reference(found[1], prefix, found[3])


def _file(path: str) -> FileReference:
    if not path.startswith("/") or path.startswith("//") or not path.isprintable():
        raise _invalid("`source` must be like file:///absolute/path/of/a/folder")
    if "\\" in path or "%" in path or _climbs(path):
        raise _invalid("the path of a file:// source may have no %, no backslash and no `..`")
    return FileReference(path.rstrip("/") or "/")


def _climbs(path: str) -> bool:
    return any(part in (".", "..") for part in re.split("[/@]", path))


def _invalid(message: str) -> SourceError:
    return SourceError("invalid_source", message)
