"""Exceptions of the adapter store.

AdapterStoreError
├── AdapterFormatError       an uploaded adapter that cannot be served exactly (`.code`, `.field`)
├── BaseModelError           the base model's folder cannot be read; raised at start
├── RegistryError            a rule of the registry (`.code`)
│   ├── ModelNotFound        no such base, adapter, version or alias that this tenant may see
│   ├── AdapterNotFound      the tenant has no adapter of that name
│   ├── VersionNotFound      the adapter has no such version
│   ├── TenantNotFound       no tenant of that name
│   ├── KeyNotFound          no API key of that id
│   ├── InvalidName          a name, alias or model reference with a wrong form
│   ├── NameTaken            the name is in use
│   ├── NameReserved         the name is kept for the base model
│   ├── InvalidField         another field with a value that can never work (`.field`)
│   ├── VersionInUse         an alias points to the version
│   ├── QuotaExceeded        the tenant may not keep so much (`.code`)
│   ├── ResidencyLimit       no more adapters can be pinned, or kept in host memory
│   ├── AliasConflict        the alias does not point to the version that the caller expected
│   ├── AliasNotFound        the adapter has no such alias
│   ├── KeyInactive          the API key is revoked or past its time
│   ├── LastAdminKey         without this API key no admin could get in
│   ├── IdempotencyKeyReused the key came with another request before
│   ├── RegistrationNotFound the tenant has no registration by reference of that id
│   ├── TooManyRegistrations the tenant has as many under way as it may
│   └── RegistryUnavailable  the database does not answer; the call may be made again
├── SourceError              an adapter registered by reference cannot be had (`.code`)
└── BlobError                the adapter's files (`.digest`)
    ├── BlobMissing          no files of that digest
    └── BlobCorrupt          the files do not hash to their digest
"""


class AdapterStoreError(Exception):
    """Base of all errors of the adapter store."""


class AdapterFormatError(AdapterStoreError):
    """An adapter that is malformed, or that cannot be served exactly as PEFT computes it.

    `code` is a stable reason code (`unsupported_field`, `foreign_tensor`, `rank_too_large`, ...);
    `field` names the config field, tensor key or archive member at fault, where there is one.
    """

    def __init__(self, code: str, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class BaseModelError(AdapterStoreError):
    """The base model's folder has no readable `config.json` or safetensors weights."""


class RegistryError(AdapterStoreError):
    """A request that a rule of the registry forbids; `code` is a stable reason code."""

    code: str

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ModelNotFound(RegistryError):
    """No base model, adapter, version or alias of that name which the tenant may see."""

    code = "model_not_found"


class AdapterNotFound(RegistryError):
    """The tenant has no adapter of that name."""

    code = "adapter_not_found"


class VersionNotFound(RegistryError):
    """The adapter has no version of that number, or no longer."""

    code = "version_not_found"


class TenantNotFound(RegistryError):
    """No tenant of that name, or not one that the caller may see."""

    code = "tenant_not_found"


class KeyNotFound(RegistryError):
    """No API key of that id, or not one of the tenant."""

    code = "key_not_found"


class InvalidName(RegistryError):
    """A name, alias or model reference that does not have the form the registry asks for."""

    code = "invalid_name"


class NameTaken(RegistryError):
    """The name is already in use."""

    code = "name_taken"


class NameReserved(RegistryError):
    """The name is kept for the base model."""

    code = "name_reserved"


class InvalidField(RegistryError):
    """A field with a value that can never work; `field` names it."""

    code = "invalid_field"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class VersionInUse(RegistryError):
    """The version cannot be deleted: an alias points to it."""

    code = "version_in_use"


class QuotaExceeded(RegistryError):
    """The tenant may not keep so much; `code` says which of its quotas it is."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ResidencyLimit(RegistryError):
    """No more adapters can be kept where this one is to be; `code` says which limit it is."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AliasConflict(RegistryError):
    """The alias does not point to the version that the caller expected."""

    code = "alias_conflict"


class AliasNotFound(RegistryError):
    """The adapter has no alias of that name."""

    code = "alias_not_found"


class KeyInactive(RegistryError):
    """The API key is revoked or past its time, and so cannot be rotated."""

    code = "key_inactive"


class LastAdminKey(RegistryError):
    """The API key is the last one that lets an admin in, and so is not revoked."""

    code = "last_admin_key"


class IdempotencyKeyReused(RegistryError):
    """The `Idempotency-Key` came with another request in the last 24 hours."""

    code = "idempotency_key_reused"


class RegistrationNotFound(RegistryError):
    """The tenant has no registration by reference of that id, or no longer."""

    code = "registration_not_found"


class TooManyRegistrations(RegistryError):
    """The tenant has as many registrations by reference under way as it may."""

    code = "too_many_registrations"


class RegistryUnavailable(RegistryError):
    """The database does not answer. The call may be made again."""

    code = "registry_unavailable"


class SourceError(AdapterStoreError):
    """A reference that is malformed or not allowed, or whose files cannot be fetched.

    `code` is a stable reason code: `invalid_source` and `source_not_allowed` before anything is
    fetched; later `private_address`, `redirect_not_allowed`, `source_not_found`, `source_denied`,
    `source_too_large`, `source_timeout`, `source_unavailable` or, where our own disk is at
    fault, `upload_storage`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = "source"


class BlobError(AdapterStoreError):
    """Base of the errors about an adapter's stored files."""

    def __init__(self, digest: str, message: str) -> None:
        super().__init__(message)
        self.digest = digest
        self.message = message


class BlobMissing(BlobError):
    """No files are stored under the digest."""


class BlobCorrupt(BlobError):
    """The stored files do not hash to their digest."""
