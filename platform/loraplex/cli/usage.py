"""`loraplex usage`: what tenants used, summed."""

from typing import Any

import click

from loraplex.cli.api_client import ApiClient
from loraplex.cli.options import Moment, json_option, print_json, print_table, with_tenant_api

_COLUMNS = (
    "period", "tenant", "adapter", "version", "requests", "prompt_tokens", "cached_tokens",
    "completion_tokens", "engine_seconds",
)  # fmt: skip


@click.command()
@click.option(
    "--since", type=Moment(),
    help="From then on: 2026-01-31, in UTC, or 2026-01-31T00:00:00Z. Default: the last day.",
)  # fmt: skip
@click.option("--until", type=Moment(), help="Before then. Default: now.")
@click.option(
    "--group-by",
    help="Of tenant, adapter, hour and day, with commas; an empty text: one sum. Default: "
    "adapter,hour, and with --all tenant,adapter,hour.",
)
@click.option("--all", "of_all", is_flag=True, help="Of all tenants; needs the admin key.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a table for a spreadsheet.")
@json_option
@with_tenant_api
def usage(
    since: str | None, until: str | None, group_by: str | None, of_all: bool, as_csv: bool,
    as_json: bool, api: ApiClient,
) -> None:  # fmt: skip
    """Show what a tenant used: its key's, or with an admin key that of --tenant or --all."""
    path = "/admin/usage" if of_all else "/v1/usage"
    asked = {"since": since, "until": until, "group_by": group_by}
    params = {name: value for name, value in asked.items() if value is not None}
    if as_csv:
        click.echo(api.text("GET", path, params=params | {"format": "csv"}), nl=False)
        return
    report: dict[str, Any] = api.call("GET", path, params=params)
    if as_json:
        print_json(report)
    else:
        rows = report["data"]
        shown = [c for c in _COLUMNS if any(row[c] is not None for row in rows)]
        print_table(shown or _COLUMNS, ([_text(row[c]) for c in shown] for row in rows))


def _text(value: object) -> object:
    return f"{value:.3f}" if isinstance(value, float) else value
