"""`loraplex keys`: the API keys of a tenant. Needs the admin key."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from loraplex.cli.api_client import ApiClient, segment
from loraplex.cli.options import json_option, print_json, print_table, to_the_second, with_api

SCOPES = ["inference", "tenant", "metrics"]
DAYS = click.option(
    "--days", type=click.IntRange(1, 36_500), help="Days until it expires; default: never."
)


@click.group()
def keys() -> None:
    """Create, list, rotate and revoke API keys."""


@keys.command("create")
@click.argument("tenant")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=["inference"],
    show_default=True, help="What the key may do; `tenant` is for managing adapters. Repeatable.",
)  # fmt: skip
@DAYS
@json_option
@with_api
def create(
    tenant: str, scopes: tuple[str, ...], days: int | None, as_json: bool, api: ApiClient
) -> None:
    """Create a key for TENANT. It is shown this once."""
    body: dict[str, Any] = {"scopes": list(scopes)}
    if days is not None:
        body["expires_at"] = (datetime.now(UTC) + timedelta(days=days)).isoformat()
    created: dict[str, Any] = api.call("POST", f"/admin/tenants/{segment(tenant)}/keys", json=body)
    if as_json:
        print_json(created)
    else:
        click.echo(created["key"])
        click.echo("Keep it now: only its hash is stored.", err=True)


@keys.command("list")
@click.argument("tenant")
@json_option
@with_api
def list_(tenant: str, as_json: bool, api: ApiClient) -> None:
    """List the keys of TENANT (never the keys themselves)."""
    found = api.list_all(f"/admin/tenants/{segment(tenant)}/keys")
    if as_json:
        print_json(found)
    else:
        print_keys(found["data"])


def print_keys(found: Iterable[Mapping[str, Any]]) -> None:
    """Print keys as the API shows them."""
    print_table(
        ["id", "key", "scopes", "created", "last used", "expires", "revoked"],
        (
            [
                k["id"],
                k["hint"],
                " ".join(k["scopes"]),
                to_the_second(k["created_at"]),
                to_the_second(k["last_used_at"]),
                to_the_second(k["expires_at"]),
                to_the_second(k["revoked_at"]),
            ]
            for k in found
        ),
    )


@keys.command("rotate")
@click.argument("tenant")
@click.argument("key_id")
@click.option(
    "--overlap", type=click.IntRange(0, 90 * 86_400), default=3600, show_default=True,
    help="Seconds that the old key works on.",
)  # fmt: skip
@json_option
@with_api
def rotate(tenant: str, key_id: str, overlap: int, as_json: bool, api: ApiClient) -> None:
    """Replace the key KEY_ID of TENANT by a new one, shown this once."""
    created: dict[str, Any] = api.call(
        "POST",
        f"/admin/tenants/{segment(tenant)}/keys/{segment(key_id)}/rotate",
        json={"overlap_seconds": overlap},
    )
    if as_json:
        print_json(created)
    else:
        click.echo(created["key"])
        click.echo(f"Keep it now. The old key works for {overlap} s more.", err=True)


@keys.command("revoke")
@click.argument("tenant")
@click.argument("key_id")
@with_api
def revoke(tenant: str, key_id: str, api: ApiClient) -> None:
    """Revoke the key KEY_ID of TENANT."""
    api.call("DELETE", f"/admin/tenants/{segment(tenant)}/keys/{segment(key_id)}")
    click.echo(f"Revoked {key_id}.")
