"""`loraplex serve`, from its options to a running service: everything that can be wrong, first."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from adapter_store.base_model import read_base_model
from adapter_store.blob_url import BlobBucket
from adapter_store.cache.redis_cache import RedisCache
from adapter_store.errors import BaseModelError, RegistryUnavailable
from adapter_store.references.policy import PolicyError, SourcePolicy
from adapter_store.registry.records import CreatedKey
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from engine.engine_args import EngineArgs, parse_engine_args
from engine.errors import ConfigError
from engine.logs import configure_logs
from engine.text.errors import TextError
from engine.text.tokenizer import Tokenizer
from loraplex.cors import cors_config
from loraplex.database import DatabaseNotMigrated, check, is_embedded, upgrade
from loraplex.settings import Settings, SettingsError, SourceSettings, StorageSettings
from loraplex.supervisor.data_dir import (
    DataDir,
    DataDirError,
    check_admin_key,
    open_data_dir,
    run_directory,
    write_admin_key,
)
from loraplex.supervisor.supervise import Service, listen, supervise
from loraplex.tracing.choose import is_traced
from loraplex.usage import write_rows
from loraplex.usage_spill import keep_restoring


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


async def serve(options: ServeOptions) -> None:
    """Run the service until it is told to stop.

    Raises `ServeError`, or `ChildCannotStart` when a process refused to start and has said why.
    """
    configure_logs("json", process="supervisor")
    try:
        model_dir = resolve_model(options.model)
        check_model(options.model, model_dir)
        with open_data_dir(options.data_dir) as data, run_directory() as run_dir:
            engine = _engine_args(options, model_dir, data, run_dir)
            settings = _settings(options, model_dir, data, engine.socket_path)
            await _prepare_schema(settings.storage.database_url)
            await _prepare_registry(data, settings, (model_dir.name, *options.served_model_names))
            with (
                _listen(options.host, options.port) as listener,
                _metrics_listeners(options) as metrics_listeners,
            ):
                url = _url(options.host, listener.getsockname()[1])
                service = Service(
                    engine=engine,
                    api=settings,
                    listener=listener,
                    metrics_listeners=metrics_listeners,
                    workers=options.workers,
                    api_silence_seconds=options.api_silence_seconds,
                    drain_seconds=options.drain_seconds,
                )
                beside = (
                    asyncio.create_task(_greet(url, model_dir, data)),
                    asyncio.create_task(_restore_usage(settings.storage)),
                )
                try:
                    await supervise(service)
                finally:
                    for task in beside:
                        task.cancel()
    except (DataDirError, SettingsError, ConfigError) as error:
        raise ServeError(str(error)) from None


def resolve_model(model: str) -> Path:
    """Return the model's folder, from the hub where it is no folder; raises `ServeError`."""
    if Path(model).is_dir():
        return Path(model).resolve()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ServeError(
            f"--model {model}: there is no such folder, and it is no hub name (org/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ServeError(f"--model {model} cannot be fetched from the hub: {error}") from None


def check_model(model: str, model_dir: Path) -> None:
    """Refuse a folder whose files no process could use; raises `ServeError`.

    What takes torch to find out (an unknown family, too little memory) the engine refuses.
    """
    try:
        read_base_model(model_dir)
        Tokenizer.from_pretrained(model_dir)
    except (BaseModelError, TextError, OSError, ValueError, RecursionError) as error:
        raise ServeError(
            f"--model {model} cannot be served: {str(error) or type(error).__name__}. It must be a "
            "Llama, Mistral, Qwen2, Qwen3, SmolLM, Phi-3 or Gemma (1 or 2) model as transformers "
            "saves it: config.json, tokenizer.json and safetensors"
        ) from None


@contextlib.contextmanager
def _metrics_listeners(options: ServeOptions) -> Generator[tuple[socket.socket, ...]]:
    """One an API process, at consecutive ports; none where metrics have no port of their own."""
    first = options.metrics_port
    with contextlib.ExitStack() as stack:
        ports = [] if first is None else [first and first + n for n in range(options.workers)]
        yield tuple(
            stack.enter_context(_listen("127.0.0.1", port, "--metrics-port")) for port in ports
        )


def _listen(host: str, port: int, option: str = "--port") -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                fix = f"stop what uses the port, or choose another with {option}"
            case errno.EACCES:
                fix = f"choose a port above 1023 with {option}"
            case _:
                fix = "choose an address of this machine with --host, as 127.0.0.1 or 0.0.0.0"
        # The library's own text repeats the address.
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        raise ServeError(f"cannot listen on {host}:{port}: {reason}; {fix}") from None


def _engine_args(
    options: ServeOptions, model_dir: Path, data: DataDir, run_dir: Path
) -> EngineArgs:
    document = {
        "model_dir": str(model_dir),
        "socket_path": str(run_dir / "engine.sock"),
        "cache_dir": str(data.cache),
        "generation": 1,
        "parent_pid": os.getpid(),
        **options.engine,
    }
    return parse_engine_args(msgspec.json.encode(document))


def _settings(
    options: ServeOptions, model_dir: Path, data: DataDir, engine_socket: str
) -> Settings:
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
        metrics_fd=None,
    )
    check_admin_key(settings.auth.admin_key)
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


async def _prepare_schema(database_url: str) -> None:
    """Migrate the embedded database, under the data directory's lock; only check a server's."""
    try:
        await (upgrade if is_embedded(database_url) else check)(database_url)
    except DatabaseNotMigrated as error:
        fix = "install that release" if error.is_newer else "run: loraplex db upgrade"
        raise ServeError(f"the registry's database cannot be used: {error}; {fix}") from None
    except ValueError as error:
        raise ServeError(f"the registry's database cannot be used: {error}") from None
    except RegistryUnavailable as error:
        reason = getattr(error.__cause__, "orig", None) or error.__cause__  # the driver's own words
        raise ServeError(
            f"the registry's database cannot be used: {reason}; mend it, put a copy back, or give "
            "another --data-dir (or LORAPLEX_DATABASE_URL)"
        ) from None


async def _prepare_registry(data: DataDir, settings: Settings, base_names: tuple[str, ...]) -> None:
    """See that no adapter hides behind the base model's names, and that there is an admin key."""
    registry = Registry(Database(settings.storage.database_url))
    try:
        if taken := await registry.names_in_use(base_names):
            raise ServeError(
                f"the base model cannot be called {taken[0]!r}: an adapter of a tenant has that "
                "name; choose another --served-model-name, or rename the model's folder"
            )
        created = None if settings.auth.admin_key else await registry.ensure_admin_key()
    finally:
        await registry.close()
    if created is not None:
        _tell_admin_key(data, created)


def _tell_admin_key(data: DataDir, created: CreatedKey) -> None:
    if sys.stdout.isatty():
        Console().print(
            f"Admin key (shown this once): [bold]{created.plain}[/bold]", highlight=False
        )
    else:
        write_admin_key(data, created.plain)
        Console(stderr=True).print(f"Admin key written to {data.admin_key_file}", highlight=False)


async def _restore_usage(storage: StorageSettings) -> None:
    """Hand the database what earlier stops left on the disk; the service starts meanwhile."""
    registry = Registry(Database(storage.database_url))
    try:
        await keep_restoring(Path(storage.usage_dir), partial(write_rows, registry))
    finally:
        await registry.close()


def _url(host: str, port: int) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{name}:{port}"


async def _greet(url: str, model_dir: Path, data: DataDir) -> None:
    """Say where the service is, once it is ready."""
    async with httpx.AsyncClient(base_url=url, timeout=2.0, trust_env=False) as http:
        while True:
            try:
                if (await http.get("/health/ready")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    Console(stderr=True).print(
        f"Loraplex serves {model_dir.name} at {url}  (API: {url}/docs, data: {data.root})",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
