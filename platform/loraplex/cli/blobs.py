"""`loraplex blobs`: the adapters' files, seen from the registry."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loraplex.cli.local_registry import data_dir_option, database_option, opened_registry
from loraplex.cli.options import json_option, print_json
from loraplex.supervisor.data_dir import DataDir

if TYPE_CHECKING:
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
@database_option
@click.option(
    "--blob-url", envvar="LORAPLEX_BLOB_URL", default=None,
    help="s3://bucket/prefix?endpoint=URL; default: the folder under the data directory.",
)  # fmt: skip
@data_dir_option
@json_option
def sweep(
    dry_run: bool, min_age: float, database_url: str | None, blob_url: str | None, data_dir: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Remove files that no version names, and name versions whose files are gone.

    Safe beside a running service, which does the same every hour. Exits 1 if files are missing:
    upload those adapters again, or bring the files back from a copy.
    """
    from adapter_store.errors import BlobError

    try:
        report, missing = asyncio.run(_sweep(database_url, blob_url, data_dir, min_age, dry_run))
    except (BlobError, ValueError) as error:
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
    from adapter_store.blob_url import open_blob_store
    from adapter_store.sweeper import find_missing
    from loraplex.housekeeping import sweep_orphans

    store = open_blob_store(blob_url, DataDir(data_dir).blobs)
    async with opened_registry(database_url, data_dir) as registry:
        report = await sweep_orphans(registry, store, min_age, dry_run=dry_run)
        return report, await find_missing(store, registry.live_digests, registry.digests_in_use)
