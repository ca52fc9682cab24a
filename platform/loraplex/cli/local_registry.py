"""How commands work at the registry itself, beside a running service or without one."""

import contextlib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loraplex.supervisor.data_dir import DataDir, DataDirError, default_data_dir

if TYPE_CHECKING:
    from adapter_store.registry.registry import Registry

database_option = click.option(
    "--database-url", envvar=["LORAPLEX_DATABASE_URL", "DATABASE_URL"], default=None,
    help="Default: the embedded database under the data directory.",
)  # fmt: skip
data_dir_option = click.option(
    "--data-dir", envvar="LORAPLEX_DATA_DIR",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    default=default_data_dir, help="Default: ~/.local/share/loraplex.",
)  # fmt: skip


@contextlib.contextmanager
def clear_errors() -> Generator[None]:
    """Turn what is wrong with a database or its URL into one line with what to do."""
    from adapter_store.errors import RegistryUnavailable
    from loraplex.database import DatabaseNotMigrated

    try:
        yield
    except DatabaseNotMigrated as error:
        fix = "install that release" if error.is_newer else "run: loraplex db upgrade"
        raise click.ClickException(f"{error}; {fix}") from None
    except RegistryUnavailable as error:
        raise click.ClickException(f"{error}: {error.__cause__}") from None
    except (DataDirError, ValueError) as error:
        raise click.ClickException(str(error)) from None


@contextlib.asynccontextmanager
async def opened_registry(database_url: str | None, data_dir: Path) -> "AsyncGenerator[Registry]":
    """The registry at a URL, or else under a data directory, with the schema of this release.

    Raises `click.ClickException` as `clear_errors` does, for calls of the registry too.
    """
    from adapter_store.registry.registry import Registry
    from adapter_store.registry.session import Database
    from loraplex.database import check

    url = database_url or DataDir(data_dir).database_url
    with clear_errors():
        await check(url)
        registry = Registry(Database(url))
        try:
            yield registry
        finally:
            await registry.close()
