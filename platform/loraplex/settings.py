"""What the service is told: frozen, checked, read from `LORAPLEX_*` and passed in.

One struct per concern; each field is one variable, `max_body_bytes` is `LORAPLEX_MAX_BODY_BYTES`.
Structs, so that the supervisor can hand them to an API process as JSON.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta

PREFIX = "LORAPLEX_"

T = TypeVar("T", bound=msgspec.Struct)

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class SettingsError(Exception):
    """A variable that cannot be read; the message names it."""


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call."""

    admin_key: Annotated[str, Meta(min_length=32)] | None = None
    """Compared in constant time, never stored; None: only keys of the registry count."""


class CorsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Web pages that may call the API from a browser."""

    cors_origins: tuple[str, ...] = ()
    """Such as `https://app.example.com`; `*` is any."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the base model is called."""

    served_model_names: tuple[str, ...] = ()
    """Further names of the base model, beside `base` and its own."""


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps on one call, all answered with a reason code before any work starts."""

    max_body_bytes: Positive = 4 * 2**20
    """JSON bodies; uploads have their own cap."""
    max_json_depth: Positive = 32
    body_seconds: Seconds = 30.0
    """A JSON body must have arrived by then."""
    max_prompts: Positive = 64
    """Prompts of one `/v1/completions` call."""
    max_choices: Positive = 128
    """Prompts x `n`."""
    max_messages: Positive = 2048
    max_stop: Positive = 16
    """Stop strings."""
    max_stop_chars: Positive = 256
    max_stop_token_ids: Positive = 128
    max_logit_bias: Positive = 1024
    max_tools: Positive = 128
    max_schema_bytes: Positive = 64 * 2**10
    """Of a JSON schema for replies or for a tool's arguments."""
    max_schema_depth: Positive = 32
    max_logprobs: Positive = 20
    """Alternatives for each token, as in OpenAI's API."""
    max_chars_per_token: Positive = 64
    """A prompt with more characters than the context's tokens times this is not tokenised."""
    max_request_timeout: Seconds = 3600.0
    """The longest `x-request-timeout` that a client may ask for."""


class UploadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps on one adapter upload."""

    max_upload_bytes: Positive = 2 * 2**30
    max_upload_config_bytes: Positive = 2**20
    upload_seconds: Seconds = 900.0
    """The whole body must have arrived by then."""
    upload_idle_seconds: Seconds = 20.0
    """Without a byte for so long the upload is given up."""


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Registration by reference."""

    sources_file: str | None = None
    """Who may name what, with whose credentials (`adapter_store.references.policy`)."""
    adapter_roots: tuple[str, ...] = ()
    """Folders under which admins may name `file://` sources."""
    source_seconds: Seconds = 900.0
    """Both files must have arrived by then. Their bytes are capped as an upload's are."""
    max_tenant_registrations: Positive = 16
    """Under way at a time, of one tenant."""
    max_parallel_sources: Positive = 4
    """Fetched at a time, by one process."""


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps on one connection, whoever is at its other end."""

    max_head_bytes: Positive = 64 * 2**10
    """Request line and headers; trailers (431)."""
    head_seconds: Seconds = 30.0
    """They must have arrived by then; so must the first ones, counted from the connection."""
    stalled_write_seconds: Seconds = 60.0
    """A client that takes no byte of its reply for so long is disconnected."""


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How replies are streamed."""

    keep_alive_seconds: Seconds = 10.0
    """A comment line goes out after so long without a token."""


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where things lie."""

    database_url: str
    blobs_dir: str
    """Adapters by digest: the truth, unless `blob_url` says otherwise."""
    blob_url: str | None = None
    """`s3://bucket/prefix?endpoint=…&region=…`; None: in `blobs_dir`."""
    redis_url: str | None = None
    """What API processes share beside the database; None: nothing, for one process."""
    cache_dir: str
    """Adapters by digest, verified, for the engine; shared with its process."""
    uploads_dir: str
    """Uploads on their way in."""
    usage_dir: str
    """Usage rows that the database had not taken at a stop."""


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who else serves."""

    api_processes: Positive = 1
    """Of which this is one. Without Redis each counts its part of a tenant's rates."""


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may read metrics without a key."""

    metrics_fd: int | None = None
    """A listening socket on loopback that this process inherits, for `/metrics` alone."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine is, and the model that it runs."""

    engine_socket: str
    model_dir: str
    hang_seconds: Seconds = 120.0
    """As long as a step may last: an engine that is silent for less is at work."""
    model_name: str | None = None
    """Of the base; None: the folder's."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All that an API process is told, by concern."""

    storage: StorageSettings
    engine: EngineSettings
    auth: AuthSettings = msgspec.field(default_factory=AuthSettings)
    cors: CorsSettings = msgspec.field(default_factory=CorsSettings)
    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    requests: RequestLimits = msgspec.field(default_factory=RequestLimits)
    uploads: UploadLimits = msgspec.field(default_factory=UploadLimits)
    sources: SourceSettings = msgspec.field(default_factory=SourceSettings)
    connections: ConnectionLimits = msgspec.field(default_factory=ConnectionLimits)
    streams: StreamSettings = msgspec.field(default_factory=StreamSettings)
    processes: ProcessSettings = msgspec.field(default_factory=ProcessSettings)
    metrics: MetricsSettings = msgspec.field(default_factory=MetricsSettings)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: Any) -> Self:
        """Read `LORAPLEX_*`; what is `given` by field name wins. Raises `SettingsError`."""
        return _read(cls, environ, given)


def _read(struct: type[T], environ: Mapping[str, str], given: dict[str, Any]) -> T:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            values[field.name] = _read(field.type, environ, given)
        elif field.name in given:
            values[field.name] = given[field.name]
        elif (text := environ.get(variable := PREFIX + field.name.upper())) is not None:
            value = text.split(",") if field.type == tuple[str, ...] else text
            values[field.name] = _convert(value, field.type, variable)
    try:
        return msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        raise SettingsError(str(error)) from None


def _convert(value: Any, type_: Any, variable: str) -> Any:
    try:
        return msgspec.convert(value, type_, strict=False)
    except msgspec.ValidationError as error:
        hint = " (try: openssl rand -hex 32)" if variable == PREFIX + "ADMIN_KEY" else ""
        raise SettingsError(f"{variable}: {error}{hint}") from None
