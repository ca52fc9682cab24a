"""`loraplex db`: the registry's schema."""

import asyncio
import contextlib
from collections.abc import Generator
from pathlib import Path

import click

from loraplex.supervisor.data_dir import DataDir, DataDirError, default_data_dir, open_data_dir


@click.group()
def db() -> None:
    """Migrate the registry's database, or check it."""


_database_option = click.option(
    "--database-url", envvar=["LORAPLEX_DATABASE_URL", "DATABASE_URL"], default=None,
    help="Default: the embedded database under the data directory.",
)  # fmt: skip
_data_dir_option = click.option(
    "--data-dir", envvar="LORAPLEX_DATA_DIR", type=click.Path(path_type=Path, file_okay=False),
    default=default_data_dir, help="Default: ~/.local/share/loraplex.",
)  # fmt: skip


@db.command("upgrade")
@_database_option
@_data_dir_option
def upgrade(database_url: str | None, data_dir: Path) -> None:
    """Bring the database to the newest schema."""
    from loraplex.database import upgrade as run_upgrade

    with _clear_errors():
        if database_url is None:
            with open_data_dir(data_dir) as data:
                revision = asyncio.run(run_upgrade(data.database_url))
        else:
            revision = asyncio.run(run_upgrade(database_url))
    click.echo(f"The database is at revision {revision}.")


@db.command("downgrade")
@click.argument("revision")
@_database_option
@_data_dir_option
@click.confirmation_option(prompt="What newer revisions stored is dropped. Go on?")
def downgrade(revision: str, database_url: str | None, data_dir: Path) -> None:
    """Bring the database back to REVISION, as before installing an older release."""
    from loraplex.database import downgrade as run_downgrade

    with _clear_errors():
        if database_url is None:
            with open_data_dir(data_dir) as data:
                asyncio.run(run_downgrade(data.database_url, revision))
        else:
            asyncio.run(run_downgrade(database_url, revision))
    click.echo(f"The database is at revision {revision}.")


@db.command("check")
@_database_option
@_data_dir_option
def check(database_url: str | None, data_dir: Path) -> None:
    """Exit 0 if the database has the newest schema, 1 with the command to run if not."""
    from loraplex.database import check as run_check

    with _clear_errors():
        url = database_url or DataDir(data_dir.resolve()).database_url
        revision = asyncio.run(run_check(url))
    click.echo(f"The database is at revision {revision}.")


@contextlib.contextmanager
def _clear_errors() -> Generator[None]:
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
