"""The registry at the service's start: its schema, its admin key, and usage of earlier runs."""

import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from adapter_store.errors import RegistryUnavailable
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
    """See that no adapter hides behind the base model's names, and that there is an admin key: in
    its file, unless a terminal shows it, for which `show_admin_key` makes it.

    Raises `ServeError`.
    """
    registry = Registry(Database(settings.storage.database_url))
    try:
        if taken := await registry.names_in_use(base_names):
            raise ServeError(
                f"the base model cannot be called {taken[0]!r}: an adapter of a tenant has that "
                "name; choose another --served-model-name, or rename the model's folder"
            )
        if settings.auth.admin_key or sys.stdout.isatty():
            return
        if (created := await registry.ensure_admin_key()) is not None:
            write_admin_key(data, created.plain)
            Console(stderr=True).print(
                f"Admin key written to {data.admin_key_file}", highlight=False
            )
    finally:
        await registry.close()


async def show_admin_key(data: DataDir, settings: Settings) -> None:
    """In a terminal, show the admin key if there was none yet, and else say where it is.

    It is made only now, when all runs: a start that fails shows none, and the next one does.
    """
    if not sys.stdout.isatty():
        return
    console = Console(soft_wrap=True, highlight=False)
    if settings.auth.admin_key:
        console.print("  Admin key  the one of the settings (LORAPLEX_ADMIN_KEY)")
        return
    registry = Registry(Database(settings.storage.database_url))
    try:
        created = await registry.ensure_admin_key()
        is_in_file = created is None and await _is_good(registry, data.admin_key_file)
    except RegistryUnavailable:
        console.print("  Admin key  not made, the registry does not answer: start again for it")
        return
    finally:
        await registry.close()
    if created is not None:
        console.print(f"  Admin key  [bold]{created.plain}[/bold]")
        console.print("             shown this once: keep it, the registry has only its hash")
    elif is_in_file:
        console.print(f"  Admin key  in {data.admin_key_file}", markup=False)
    else:
        console.print("  Admin key  shown when it was made; another: loraplex admin-keys create")


async def _is_good(registry: Registry, file: Path) -> bool:
    return (key := _text_of(file)) is not None and await registry.authenticate(key) is not None


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


async def restore_usage(storage: StorageSettings) -> None:
    """Hand the database what earlier stops left on the disk; the service starts meanwhile."""
    registry = Registry(Database(storage.database_url))
    try:
        await keep_restoring(Path(storage.usage_dir), partial(write_rows, registry))
    finally:
        await registry.close()
