"""Who may register what by reference, and with whose credentials: the operator's file.

Without a file, any tenant may name public repositories and public buckets, which are fetched
without credentials. The file holds names of environment variables and no secret:

    {
      "credentials": {
        "acme-hub": {"type": "hub", "token_env": "ACME_HUB_TOKEN"},
        "lake": {"type": "s3", "access_key_id_env": "LAKE_ID", "secret_access_key_env": "LAKE_KEY",
                 "region": "eu-west-1"}
      },
      "grants": [
        {"tenant": "acme", "source": "hf://acme-org", "credential": "acme-hub"},
        {"tenant": "acme", "source": "s3://acme-lake/adapters", "credential": "lake"}
      ]
    }
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from adapter_store.errors import SourceError
from adapter_store.references.reference import (
    HubReference,
    Reference,
    S3Reference,
    parse_reference,
)

_ORIGIN = re.compile(r"https?://[^/@?#\s]+")
_ORGANISATION = re.compile(r"hf://([A-Za-z0-9][A-Za-z0-9._-]{0,95})/?")


class PolicyError(Exception):
    """The operator's file cannot be used; the message names the fault."""


class _Secretive(msgspec.Struct, frozen=True, kw_only=True):
    def __repr__(self) -> str:  # no log and no traceback may show what a variable holds
        return f"{type(self).__name__}(…)"


class HubCredential(_Secretive, frozen=True, kw_only=True, tag="hub", forbid_unknown_fields=True):
    """A token of the hub; `token` is read from the variable."""

    token_env: str
    token: str = ""


class S3Credential(_Secretive, frozen=True, kw_only=True, tag="s3", forbid_unknown_fields=True):
    """An access key; both parts are read from their variables."""

    access_key_id_env: str
    secret_access_key_env: str
    region: str = "us-east-1"
    endpoint: str | None = None
    """Default: AWS in that region."""
    access_key_id: str = ""
    secret_access_key: str = ""


Credential = HubCredential | S3Credential


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant may use a hub organisation or a bucket's prefix, with a credential or without."""

    tenant: str
    source: str
    credential: str | None = None


class SourcePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it. Hosts are exact (`hub.example.com`) or patterns (`*.example.com`)."""

    public_sources: bool = True
    """Whether what no grant covers may be fetched, without credentials."""
    hub_url: str = "https://huggingface.co"
    hub_redirect_hosts: tuple[str, ...] = (
        "huggingface.co", "*.huggingface.co", "hf.co", "*.hf.co",
    )  # fmt: skip
    s3_endpoint: str | None = None
    """Where buckets without a credential's endpoint are; default: AWS."""
    private_hosts: tuple[str, ...] = ()
    """Exact hosts that may have private addresses and plain http: an on-premise hub or store."""
    credentials: Mapping[str, Credential] = {}
    grants: tuple[Grant, ...] = ()

    @classmethod
    def load(cls, file: Path, environ: Mapping[str, str]) -> Self:
        """Read the file and the variables that it names; raises `PolicyError`."""
        try:
            policy = msgspec.json.decode(file.read_bytes(), type=cls)
        except OSError as error:
            raise PolicyError(f"{file}: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise PolicyError(f"{file}: {error}") from None
        policy._check(file)
        named = {
            name: _with_secrets(name, credential, environ)
            for name, credential in policy.credentials.items()
        }
        return msgspec.structs.replace(policy, credentials=named)

    def credential_for(
        self, reference: Reference, tenant: str, granted: Mapping[str, str | None] | None = None
    ) -> Credential | None:
        """The credential of the narrowest grant that covers the reference, None for none.

        `granted` are further grants of this tenant: credentials' names by source, which go before
        those of the file. Raises `SourceError` (`source_not_allowed`) if there is no grant and
        public sources are off, or the credential no longer exists.
        """
        by_source = {grant.source: grant.credential for grant in self.grants_of(tenant)}
        by_source |= granted or {}
        covering = [source for source in by_source if _covers(source, reference)]
        if covering:
            name = by_source[max(covering, key=len)]
            if name is None:
                return None
            if (credential := self.credentials.get(name)) is None:
                raise SourceError(
                    "source_not_allowed", f"the service has no credential {name!r} any more"
                )
            return credential
        if not self.public_sources:
            raise SourceError("source_not_allowed", "the tenant has no grant for this source")
        return None

    def grants_of(self, tenant: str) -> list[Grant]:
        """The file's grants of a tenant."""
        return [grant for grant in self.grants if grant.tenant == tenant]

    def check_grant(self, source: str, credential: str | None) -> None:
        """Raise `PolicyError` unless it may be granted: its form, and a credential of its type."""
        kind = _kind_of_grant(source)
        if kind is None:
            raise PolicyError(
                f"a grant's source is hf://organisation or s3://bucket/prefix, not {source!r}"
            )
        if credential is not None and not isinstance(self.credentials.get(credential), kind):
            raise PolicyError(
                f"the grant {source!r} names the credential {credential!r}, and there is none of "
                "that name and type"
            )

    def _check(self, file: Path) -> None:
        endpoints = [self.hub_url, self.s3_endpoint]
        for name, credential in self.credentials.items():
            if any(_secrets(credential)):
                raise PolicyError(f"{file}: the secrets of {name!r} belong into variables")
            if isinstance(credential, S3Credential):
                endpoints.append(credential.endpoint)
        for endpoint in endpoints:
            if endpoint is None:
                continue
            if not _ORIGIN.fullmatch(endpoint):
                raise PolicyError(f"{file}: {endpoint!r} must be like https://host")
            host = urlsplit(endpoint).hostname or ""
            if endpoint.startswith("http:") and host not in self.private_hosts:
                raise PolicyError(f"{file}: http is for `private_hosts` only, not for {host!r}")
        for grant in self.grants:
            try:
                self.check_grant(grant.source, grant.credential)
            except PolicyError as error:
                raise PolicyError(f"{file}: {error}") from None


def _with_secrets(name: str, credential: Credential, environ: Mapping[str, str]) -> Credential:
    def read(variable: str) -> str:
        if not (value := environ.get(variable)):
            raise PolicyError(f"the credential {name!r} needs the variable {variable}")
        return value

    if isinstance(credential, HubCredential):
        return msgspec.structs.replace(credential, token=read(credential.token_env))
    return msgspec.structs.replace(
        credential,
        access_key_id=read(credential.access_key_id_env),
        secret_access_key=read(credential.secret_access_key_env),
    )


def _secrets(credential: Credential) -> tuple[str, ...]:
    if isinstance(credential, HubCredential):
        return (credential.token,)
    return credential.access_key_id, credential.secret_access_key


def _kind_of_grant(source: str) -> type[Credential] | None:
    if _ORGANISATION.fullmatch(source):
        return HubCredential
    try:
        parsed = parse_reference(source)
    except SourceError:
        return None
    return S3Credential if isinstance(parsed, S3Reference) and parsed.region is None else None


def _covers(source: str, reference: Reference) -> bool:
    if isinstance(reference, HubReference):
        organisation = _ORGANISATION.fullmatch(source)
        return organisation is not None and reference.repository.startswith(organisation[1] + "/")
    if not isinstance(reference, S3Reference) or not source.startswith("s3://"):
        return False
    granted = parse_reference(source)
    assert isinstance(granted, S3Reference)
    return granted.bucket == reference.bucket and (
        not granted.prefix or (reference.prefix + "/").startswith(granted.prefix + "/")
    )
