"""What the registry takes and gives: plain frozen records, never ORM rows. Times are UTC, aware."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

Scope = Literal["admin", "tenant", "inference", "metrics"]
"""`admin`: everything, platform keys only. `tenant`: a tenant's adapters, aliases and usage.
`inference`: calls to its models. `metrics`: the metrics page."""

Residency = Literal["pinned", "warm", "auto"]
"""`pinned`: holds a slot. `warm`: stays in host memory. `auto`: comes and goes with its use."""

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0
"""The scheduler counts tokens divided by the weight, in a float: a weight near 0 would drive the
counters to where a token no longer changes them, everybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a tenant may use; None: as much as there is."""

    requests_per_minute: int | None = None
    """Generation calls, and apart from them as many others. Over every minute that slides along."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens, cached ones included."""
    max_concurrent: int | None = None
    """Sequences that run at once; more wait."""
    max_queued: int | None = None
    """Sequences that wait."""
    max_slots: int | None = None
    """Slots of the engine that its adapters use at once; sequences of others wait."""
    max_adapters: int | None = None
    max_adapter_bytes: int | None = None
    """Of all versions' weights files together."""
    max_rank: int | None = None


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """A tenant. `weight` is its share of the engine."""

    name: str
    weight: float
    created_at: datetime
    suspended_at: datetime | None = None
    """Since when its keys answer 403; None while they work."""
    quota: Quota = Quota()
    sources: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """What it may register by reference, and with which credential."""


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """An API key without its secret. `tenant` is None for a platform key."""

    key_id: str
    hint: str
    """The key's last characters, to recognise it by."""
    tenant: str | None
    scopes: frozenset[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """Written once a minute at most."""


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new key; `plain` is shown once and stored nowhere."""

    plain: str
    info: KeyInfo

    @property
    def key_id(self) -> str:
        """The key's public handle."""
        return self.info.key_id


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a key speaks for."""

    key_id: str
    tenant: TenantInfo | None
    scopes: frozenset[str]
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """The outcome of an upload. `created` is False where the newest version is the same already."""

    name: str
    version: int
    digest: str
    created: bool
    published: bool
    """Whether the alias `default` points to this version now."""
    previous: int | None
    """The version that `default` pointed to before; None where there was none."""
    report: Mapping[str, Any]
    replayed: bool = False
    """Whether this is the stored outcome of an earlier call with the same `Idempotency-Key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingDefaults:
    """How a version is served where a request says nothing else."""

    chat_template: str | None = None
    """Jinja, in place of the base model's."""
    takes_tools: bool = False
    """Whether that template shows the model what tools it may call."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end every reply, as the vocabulary spells them."""
    sampling: Mapping[str, int | float] = field(default_factory=dict[str, int | float])
    """By the name of the request's field."""


AS_THE_BASE = ServingDefaults()


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """An adapter version, found by a model reference. The digest is its identity from here on."""

    tenant: str
    name: str
    version: int
    digest: str
    base_fingerprint: str
    serving: ServingDefaults = AS_THE_BASE
    rank: int = 0
    full_values: int = 0
    """Of an embedding and an output layer of its own."""

    @property
    def label(self) -> str:
        """`name@N`, for people."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class Canary:
    """A second version behind an alias, and the share (0 to 1) of requests that it gets."""

    version: int
    share: float


@dataclass(frozen=True, slots=True)
class Route:
    """Where a model reference leads: to a version, and for a share of requests to its canary."""

    alias: str
    """`tenant/name:alias`; who gets the canary depends on it."""
    stable: ResolvedAdapter
    canary: ResolvedAdapter | None = None
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter with its aliases (name → version)."""

    name: str
    latest_version: int
    num_versions: int
    aliases: Mapping[str, int]
    canaries: Mapping[str, Canary]
    """By the alias that they are behind."""
    created_at: datetime
    updated_at: datetime
    """When its newest version came."""
    residency: Residency = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyLimits:
    """How many different adapters may be kept, over all tenants. Bytes are those of files."""

    base_fingerprint: str
    """Only adapters of this base model count, and only they can be kept."""
    max_pinned: int
    max_warm: int
    max_bytes: int
    """Of pinned and warm adapters together."""
    max_rank: int | None = None
    max_full_values: int | None = None
    """Adapters beyond these cannot be served, and so not be kept; None: any can."""


@dataclass(frozen=True, slots=True)
class ResidentAdapters:
    """Digests of the versions that `default` names, each once, the oldest names' first."""

    pinned: tuple[str, ...]
    warm: tuple[str, ...]
    """Those that are not pinned too."""


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One immutable version of an adapter. `bytes` counts the weights file."""

    name: str
    version: int
    digest: str
    state: str
    rank: int
    bytes: int
    base_fingerprint: str
    config: Mapping[str, Any]
    report: Mapping[str, Any]
    serving: ServingDefaults
    aliases: tuple[str, ...]
    created_at: datetime

    @property
    def label(self) -> str:
        """`name@N`, for people."""
        return f"{self.name}@{self.version}"

    @property
    def full_values(self) -> int:
        """Of an embedding and an output layer of its own."""
        return self.report.get("full_values", 0)


@dataclass(frozen=True, slots=True)
class AliasChange:
    """An alias after a move; `previous` is the version to give back for a roll-back."""

    alias: str
    version: int
    previous: int | None
    canary: Canary | None = None
    replayed: bool = False
    """Whether this is the stored outcome of an earlier call with the same `Idempotency-Key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """What one request used. `adapter` and `version` are None for the base model."""

    request_id: str
    tenant: str
    adapter: str | None
    version: int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    queue_seconds: float = 0.0
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    engine_seconds: float = 0.0
    """Its tokens' share of the engine's steps."""
    created_at: datetime | None = None
    """When the call was over; the registry fills in the time at which it stores it."""


UsageGroup = Literal["tenant", "adapter", "hour", "day"]
"""What usage is summed by; `adapter` means its versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """A sum over requests. What it is not grouped by is None."""

    period: str | None
    """When its hour or day began, as in `2026-01-31T13:00:00Z`."""
    tenant: str | None
    adapter: str | None
    """`base` for the base model."""
    version: int | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    engine_seconds: float


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who changed what. `actor` is a key id, `admin` or `system`; `tenant` a tenant's name."""

    entry_id: int
    """Grows; a page ends before it."""
    created_at: datetime
    actor: str
    action: str
    tenant: str | None
    subject: str
    detail: Mapping[str, Any]
