"""The registry at the service's start: its schema, its admin key, and usage of earlier runs."""

import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.records import CreatedKey
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from loraplex.database import DatabaseNotMigrated, check, is_embedded, upgrade
from loraplex.settings import Settings, StorageSettings
from loraplex.supervisor.data_dir import DataDir, write_admin_key
from loraplex.supervisor.serve_options import ServeError
from loraplex.usage import write_rows
from loraplex.usage_spill import keep_restoring


async def prepare_schema(database_url: str) -> None:
    """Migrate the embedded database, under the data directory's lock; only check a server's.

    Raises `ServeError`.
    """
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


async def prepare_registry(data: DataDir, settings: Settings, base_names: tuple[str, ...]) -> None:
    """See that no adapter hides behind the base model's names, and that there is an admin key.

    Raises `ServeError`.
    """
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


async def restore_usage(storage: StorageSettings) -> None:
    """Hand the database what earlier stops left on the disk; the service starts meanwhile."""
    registry = Registry(Database(storage.database_url))
    try:
        await keep_restoring(Path(storage.usage_dir), partial(write_rows, registry))
    finally:
        await registry.close()
