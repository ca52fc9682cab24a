"""What `loraplex serve` was told, and what that means for the engine and the API processes.

Whatever can be wrong with it is found here, before a process starts.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from adapter_store.blob_url import BlobBucket
from adapter_store.cache.redis_cache import RedisCache
from adapter_store.references.policy import PolicyError, SourcePolicy
from engine.engine_args import EngineArgs, parse_engine_args
from loraplex.cors import cors_config
from loraplex.database import is_embedded
from loraplex.settings import Settings, SourceSettings, StorageSettings
from loraplex.supervisor.data_dir import DataDir
from loraplex.tracing.choose import is_traced


class ServeError(Exception):
    """The service cannot start, or could not go on; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line was told."""

    model: str
    """A folder, or a name on the Hugging Face hub."""
    data_dir: Path
    served_model_names: tuple[str, ...] = ()
    adapter_roots: tuple[str, ...] = ()
    """Where admins may register adapters from by `file://`."""
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    """API processes."""
    api_silence_seconds: float = 10.0
    drain_seconds: float = 30.0
    metrics_port: int | None = None
    """Of the first API process, on loopback."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `EngineArgs`; None means automatic."""

    @property
    def model_name(self) -> str:
        """What the base is called: the folder's name, or the hub name's last part."""
        folder = Path(self.model)
        return folder.resolve().name if folder.is_dir() else self.model.rpartition("/")[2]

    @property
    def base_names(self) -> tuple[str, ...]:
        """All names of the base."""
        return self.model_name, *self.served_model_names


def engine_args_of(
    options: ServeOptions, model_dir: Path, data: DataDir, run_dir: Path
) -> EngineArgs:
    """Arguments of the engine's first start; raises `ConfigError`."""
    document = {
        "model_dir": str(model_dir),
        "model_name": options.model_name,
        "socket_path": str(run_dir / "engine.sock"),
        "cache_dir": str(data.cache),
        "generation": 1,
        "parent_pid": os.getpid(),
        **options.engine,
    }
    return parse_engine_args(msgspec.json.encode(document))


def settings_of(
    options: ServeOptions, model_dir: Path, data: DataDir, engine_socket: str
) -> Settings:
    """Settings of the API processes, from the options and the environment.

    Raises `ServeError`, `SettingsError` or `DataDirError`, which name what cannot work.
    """
    for name in options.served_model_names:
        if not name or len(name) > 128 or any(c.isspace() or c in "@:" for c in name):
            raise ServeError(
                f"--served-model-name {name!r}: 1 to 128 characters without spaces, @ and :"
            )
    settings = Settings.from_env(
        os.environ,
        served_model_names=options.served_model_names,
        **({"adapter_roots": options.adapter_roots} if options.adapter_roots else {}),
        database_url=os.environ.get("LORAPLEX_DATABASE_URL")
        or os.environ.get("DATABASE_URL", data.database_url),
        redis_url=os.environ.get("LORAPLEX_REDIS_URL") or os.environ.get("REDIS_URL"),
        api_processes=options.workers,
        blobs_dir=str(data.blobs),
        cache_dir=str(data.cache),
        uploads_dir=str(data.uploads),
        usage_dir=str(data.usage),
        engine_socket=engine_socket,
        model_dir=str(model_dir),
        model_name=options.model_name,
        metrics_fd=None,
    )
    cors_config(settings.cors)
    _check_shared(options.workers, settings.storage)
    _check_sources(settings.sources)
    is_traced(os.environ)  # raises where an API process could not do what is asked
    if settings.storage.redis_url is not None:
        try:
            RedisCache(settings.storage.redis_url, "")
        except ValueError:
            raise ServeError(
                "LORAPLEX_REDIS_URL has no form like redis://host:6379/0, rediss://… or unix://…"
            ) from None
    if settings.storage.blob_url is not None:
        try:
            BlobBucket.parse(settings.storage.blob_url)
        except ValueError as error:
            raise ServeError(f"LORAPLEX_BLOB_URL: {error}") from None
    return settings


def _check_shared(workers: int, storage: StorageSettings) -> None:
    """Several API processes must see each other's changes at once, and not wait for each other."""
    if workers == 1:
        return
    missing: list[str] = []
    with contextlib.suppress(ValueError):  # what is wrong with the URL is said later
        if is_embedded(storage.database_url):
            missing.append("PostgreSQL (LORAPLEX_DATABASE_URL)")
    if storage.redis_url is None:
        missing.append("Redis (LORAPLEX_REDIS_URL)")
    if missing:
        raise ServeError(
            f"--workers {workers} needs {' and '.join(missing)}: API processes share a registry "
            "and tell each other of changes; set what is missing, or use --workers 1"
        )


def _check_sources(sources: SourceSettings) -> None:
    for root in sources.adapter_roots:
        if not Path(root).is_absolute() or not Path(root).is_dir():
            raise ServeError(f"--adapter-root {root}: give the absolute path of a folder")
    if sources.sources_file is not None:
        try:
            SourcePolicy.load(Path(sources.sources_file), os.environ)
        except PolicyError as error:
            raise ServeError(f"LORAPLEX_SOURCES_FILE: {error}") from None
