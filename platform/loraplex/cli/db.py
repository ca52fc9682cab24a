"""`loraplex db`: the registry's schema."""

import asyncio
from pathlib import Path

import click

from loraplex.cli.local_registry import clear_errors, data_dir_option, database_option
from loraplex.supervisor.data_dir import DataDir, open_data_dir


@click.group()
def db() -> None:
    """Migrate the registry's database, or check it."""


@db.command("upgrade")
@database_option
@data_dir_option
def upgrade(database_url: str | None, data_dir: Path) -> None:
    """Bring the database to the newest schema."""
    from loraplex.database import upgrade as run_upgrade

    with clear_errors():
        if database_url is None:
            with open_data_dir(data_dir) as data:
                revision = asyncio.run(run_upgrade(data.database_url))
        else:
            revision = asyncio.run(run_upgrade(database_url))
    click.echo(f"The database is at revision {revision}.")


@db.command("downgrade")
@click.argument("revision")
@database_option
@data_dir_option
@click.confirmation_option(prompt="What newer revisions stored is dropped. Go on?")
def downgrade(revision: str, database_url: str | None, data_dir: Path) -> None:
    """Bring the database back to REVISION, as before installing an older release."""
    from loraplex.database import downgrade as run_downgrade

    with clear_errors():
        if database_url is None:
            with open_data_dir(data_dir) as data:
                asyncio.run(run_downgrade(data.database_url, revision))
        else:
            asyncio.run(run_downgrade(database_url, revision))
    click.echo(f"The database is at revision {revision}.")


@db.command("check")
@database_option
@data_dir_option
def check(database_url: str | None, data_dir: Path) -> None:
    """Exit 0 if the database has the newest schema, 1 with the command to run if not."""
    from loraplex.database import check as run_check

    with clear_errors():
        url = database_url or DataDir(data_dir).database_url
        revision = asyncio.run(run_check(url))
    click.echo(f"The database is at revision {revision}.")
