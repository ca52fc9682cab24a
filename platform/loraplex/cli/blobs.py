"""`loraplex blobs`: the adapters' files, seen from the registry."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loraplex.cli.options import json_option, print_json
from loraplex.supervisor.data_dir import DataDir, default_data_dir

if TYPE_CHECKING:
    from adapter_store.blobs import BlobStore
    from adapter_store.registry.registry import Registry
    from adapter_store.sweeper import SweepReport


@click.group()
def blobs() -> None:
    """Sweep the adapters' files, or see what is amiss."""


@blobs.command("sweep")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@click.option(
    "--min-age", type=click.FloatRange(0), default=3600.0, show_default=True, metavar="SECONDS",
    help="Younger files are left alone: an upload may be at work on them.",
)  # fmt: skip
@click.option(
    "--database-url", envvar=["LORAPLEX_DATABASE_URL", "DATABASE_URL"], default=None,
    help="Default: the embedded database under the data directory.",
)  # fmt: skip
@click.option(
    "--blob-url", envvar="LORAPLEX_BLOB_URL", default=None,
    help="s3://bucket/prefix?endpoint=URL; default: the folder under the data directory.",
)  # fmt: skip
@click.option(
    "--data-dir", envvar="LORAPLEX_DATA_DIR", type=click.Path(path_type=Path, file_okay=False),
    default=default_data_dir, help="Default: ~/.local/share/loraplex.",
)  # fmt: skip
@json_option
def sweep(
    dry_run: bool, min_age: float, database_url: str | None, blob_url: str | None, data_dir: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Remove files that no version names, and name versions whose files are gone.

    Safe beside a running service, which does the same every hour. Exits 1 if files are missing:
    upload those adapters again, or bring the files back from a copy.
    """
    from adapter_store.errors import BlobError, RegistryUnavailable

    try:
        report, missing = asyncio.run(
            _sweep(database_url, blob_url, data_dir.resolve(), min_age, dry_run)
        )
    except (BlobError, RegistryUnavailable, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if report is None:
        raise click.ClickException(
            "the registry names none of the stored files: it is another registry, or a new one; "
            "nothing was removed"
        )
    if as_json:
        print_json(
            {
                "dry_run": dry_run, "orphans": report.orphans, "leftovers": report.leftovers,
                "missing": missing,
            }
        )  # fmt: skip
    else:
        _tell(report, missing, "would be removed" if dry_run else "removed")
    if missing:
        raise click.exceptions.Exit(1)


def _tell(report: "SweepReport", missing: list[str], what: str) -> None:
    for digest in report.orphans:
        click.echo(f"orphan {digest} {what}")
    for digest in missing:
        click.echo(f"missing {digest}: a version names it and its files are gone")
    click.echo(
        f"{len(report.orphans)} orphans and {report.leftovers} leftovers {what}, "
        f"{len(missing)} missing."
    )


async def _sweep(
    database_url: str | None, blob_url: str | None, data_dir: Path, min_age: float, dry_run: bool
) -> "tuple[SweepReport | None, list[str]]":
    from adapter_store.sweeper import find_missing
    from loraplex.housekeeping import sweep_orphans

    async with _opened(database_url, blob_url, data_dir) as (registry, store):
        report = await sweep_orphans(registry, store, min_age, dry_run=dry_run)
        return report, await find_missing(store, registry.is_live, registry.digests_in_use)


@contextlib.asynccontextmanager
async def _opened(
    database_url: str | None, blob_url: str | None, data_dir: Path
) -> "AsyncGenerator[tuple[Registry, BlobStore]]":
    from adapter_store.blob_url import open_blob_store
    from adapter_store.registry.registry import Registry
    from adapter_store.registry.session import Database
    from loraplex.database import DatabaseNotMigrated, check

    data = DataDir(data_dir)
    store = open_blob_store(blob_url, data.blobs)
    url = database_url or data.database_url
    try:
        await check(url)
    except DatabaseNotMigrated as error:
        raise ValueError(f"{error}. Run: loraplex db upgrade") from None
    registry = Registry(Database(url))
    try:
        yield registry, store
    finally:
        await registry.close()
