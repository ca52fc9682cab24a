"""`loraplex admin-keys`: the service's own keys, at its registry. Needs no key: the way back in."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from loraplex.cli.keys import DAYS, print_keys
from loraplex.cli.local_registry import data_dir_option, database_option, opened_registry
from loraplex.cli.options import json_option, print_json

if TYPE_CHECKING:
    from adapter_store.registry.records import KeyInfo
    from adapter_store.registry.registry import Registry

T = TypeVar("T")

_ACTOR = "cli"
"""Who did it, in the audit log: whoever may write to the registry's database."""


@click.group("admin-keys")
def admin_keys() -> None:
    """Create, list and revoke admin keys, on the service's machine."""


@admin_keys.command("create")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(["admin", "metrics"]), default=["admin"],
    show_default=True, help="`metrics` alone: the key reads the metrics page, and no more.",
)  # fmt: skip
@DAYS
@json_option
@database_option
@data_dir_option
def create(
    scopes: tuple[str, ...], days: int | None, as_json: bool,
    database_url: str | None, data_dir: Path,
) -> None:  # fmt: skip
    """Create an admin key. It is shown this once, and good at once."""
    ends = None if days is None else datetime.now(UTC) + timedelta(days=days)
    created = _run(database_url, data_dir, lambda r: r.create_key(None, scopes, ends, actor=_ACTOR))
    if as_json:
        print_json({"key": created.plain, **_shown(created.info)})
    else:
        click.echo(created.plain)
        click.echo("Keep it now: only its hash is stored.", err=True)


@admin_keys.command("list")
@json_option
@database_option
@data_dir_option
def list_(as_json: bool, database_url: str | None, data_dir: Path) -> None:
    """List admin keys (never the keys themselves); that of LORAPLEX_ADMIN_KEY is none of them."""
    found = [_shown(k) for k in _run(database_url, data_dir, lambda r: r.list_keys(None))]
    if as_json:
        print_json({"data": found})
    else:
        print_keys(found)


@admin_keys.command("revoke")
@click.argument("key_id")
@click.option(
    "--last", is_flag=True,
    help="Also the last one that works: LORAPLEX_ADMIN_KEY lets admins in, or nobody is to.",
)  # fmt: skip
@database_option
@data_dir_option
def revoke(key_id: str, last: bool, database_url: str | None, data_dir: Path) -> None:
    """Revoke the admin key KEY_ID; services that run refuse it within a second."""
    from adapter_store.errors import KeyNotFound, LastAdminKey

    try:
        _run(
            database_url, data_dir,
            lambda r: r.revoke_own_key(key_id, may_be_last=last, actor=_ACTOR),
        )  # fmt: skip
    except KeyNotFound as error:
        raise click.ClickException(f"{error.message} of the service's own") from None
    except LastAdminKey as error:
        raise click.ClickException(
            f"{error.message} (loraplex admin-keys create), or give --last"
        ) from None
    click.echo(f"Revoked {key_id}.")


def _run(database_url: str | None, data_dir: Path, work: "Callable[[Registry], Awaitable[T]]") -> T:
    async def run() -> T:
        async with opened_registry(database_url, data_dir) as registry:
            return await work(registry)

    return asyncio.run(run())


def _shown(key: "KeyInfo") -> dict[str, Any]:
    """A key as `/admin/keys` shows it."""
    import msgspec

    return msgspec.to_builtins(
        {
            "id": key.key_id, "hint": key.hint, "scopes": sorted(key.scopes),
            "created_at": key.created_at, "expires_at": key.expires_at,
            "revoked_at": key.revoked_at, "last_used_at": key.last_used_at,
        }
    )  # fmt: skip
