"""`loraplex adapters export`, `rm` and `unalias`: what leaves the registry, or ends in it."""

from pathlib import Path

import click
from rich.filesize import decimal

from loraplex.cli.api_client import ApiClient, segment
from loraplex.cli.options import with_tenant_api


@click.command("export")
@click.argument("name")
@click.argument("version", type=click.IntRange(1))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; default: NAME-VERSION.zip in this folder.",
)  # fmt: skip
@with_tenant_api
def export(name: str, version: int, out: Path | None, api: ApiClient) -> None:
    """Download VERSION of NAME: a zip of its two files, as they came, and a manifest.

    `adapters push` takes that zip, and gives it the same digest.
    """
    if out is None:
        out = Path(f"{Path(name).name}-{version}.zip")
    size = api.download(f"/v1/adapters/{segment(name)}/versions/{version}/export", out)
    click.echo(f"{name}@{version} is in {out}, {decimal(size)}")


@click.command("rm")
@click.argument("name")
@click.argument("version", type=click.IntRange(1), required=False)
@click.option("--abort", is_flag=True, help="End the requests that run on it, too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_tenant_api
def rm(name: str, version: int | None, abort: bool, yes: bool, api: ApiClient) -> None:
    """Remove VERSION of NAME; without VERSION, NAME with all its versions and aliases."""
    what = f"{name} with all its versions" if version is None else f"{name}@{version}"
    if not yes:
        click.confirm(f"Remove {what}?", abort=True)
    path = f"/v1/adapters/{segment(name)}" + ("" if version is None else f"/versions/{version}")
    api.call("DELETE", path, params={"abort": "true"} if abort else {})
    click.echo(f"Removed {what}.")


@click.command("unalias")
@click.argument("name")
@click.argument("alias")
@with_tenant_api
def unalias(name: str, alias: str, api: ApiClient) -> None:
    """Remove ALIAS of NAME. Without `default` the bare NAME means no version."""
    api.call("DELETE", f"/v1/adapters/{segment(name)}/aliases/{segment(alias)}")
    click.echo(f"Removed {name}:{alias}.")
