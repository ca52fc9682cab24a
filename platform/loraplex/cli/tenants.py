"""`loraplex tenants`: who shares the service. Needs the admin key."""

from typing import Any

import click

from adapter_store.registry.records import MAX_WEIGHT, MIN_WEIGHT
from loraplex.cli.api_client import ApiClient
from loraplex.cli.options import json_option, print_json, print_table, with_api


class _Weight(click.FloatRange):
    """A number in the range that the service takes; NaN is in none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail("nan is no number", param, ctx)
        return number


WEIGHT = _Weight(MIN_WEIGHT, MAX_WEIGHT)


@click.group()
def tenants() -> None:
    """Create and list tenants."""


@tenants.command("create")
@click.argument("name")
@click.option("--weight", type=WEIGHT, default=1.0, show_default=True, help="Share of the engine.")
@json_option
@with_api
def create(name: str, weight: float, as_json: bool, api: ApiClient) -> None:
    """Create the tenant NAME."""
    tenant: dict[str, Any] = api.call(
        "POST", "/admin/tenants", json={"name": name, "weight": weight}
    )
    if as_json:
        print_json(tenant)
    else:
        click.echo(
            f"Created tenant {tenant['name']}. Next: loraplex keys create "
            f"{tenant['name']} --scope tenant --scope inference"
        )


@tenants.command("list")
@json_option
@with_api
def list_(as_json: bool, api: ApiClient) -> None:
    """List all tenants."""
    found: dict[str, Any] = api.call("GET", "/admin/tenants")
    if as_json:
        print_json(found)
        return
    print_table(
        ["tenant", "weight", "created"],
        ([t["name"], t["weight"], t["created_at"]] for t in found["data"]),
    )
