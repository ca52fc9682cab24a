"""`loraplex tenants`: who shares the service. Needs the admin key."""

from collections.abc import Callable
from typing import Any

import click

from adapter_store.registry.records import MAX_WEIGHT, MIN_WEIGHT
from loraplex.cli.api_client import ApiClient, segment
from loraplex.cli.options import json_option, print_json, print_table, to_the_second, with_api


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
    """Create, list, suspend and rm tenants."""


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
    found = api.list_all("/admin/tenants")
    if as_json:
        print_json(found)
        return
    print_table(
        ["tenant", "weight", "created", "suspended"],
        (
            [
                t["name"],
                t["weight"],
                to_the_second(t["created_at"]),
                to_the_second(t["suspended_at"]),
            ]
            for t in found["data"]
        ),
    )


@tenants.group("quota")
def quota() -> None:
    """Show or set what a tenant may use."""


_LIMITS = (
    ("--requests-per-minute", "Generation calls a minute."),
    ("--tokens-per-minute", "Prompt and output tokens a minute, cached ones included."),
    ("--max-concurrent", "Sequences that run at once; more wait."),
    ("--max-queued", "Sequences that wait."),
    ("--max-slots", "Adapters in the engine's slots at once; calls of others wait."),
    ("--max-adapters", "Adapters."),
    ("--max-adapter-bytes", "Bytes of all versions' weights files together."),
    ("--max-rank", "Rank of an adapter."),
)


def _with_limits(command: Callable[..., None]) -> Callable[..., None]:
    for option, text in reversed(_LIMITS):
        command = click.option(option, type=click.IntRange(1, 2**53), help=text)(command)
    return command


@quota.command("show")
@click.argument("name")
@json_option
@with_api
def show_quota(name: str, as_json: bool, api: ApiClient) -> None:
    """Show what the tenant NAME may use."""
    _print_quota(api.call("GET", f"/admin/tenants/{segment(name)}"), as_json)


@quota.command("set")
@click.argument("name")
@_with_limits
@click.option("--weight", type=WEIGHT, help="Share of the engine; without it, as before.")
@json_option
@with_api
def set_quota(
    name: str, weight: float | None, as_json: bool, api: ApiClient, **limits: int | None
) -> None:
    """Replace what the tenant NAME may use: what is not given has no limit any more."""
    body = {"weight": weight, **limits}
    _print_quota(api.call("PUT", f"/admin/tenants/{segment(name)}/quota", json=body), as_json)


def _print_quota(tenant: dict[str, Any], as_json: bool) -> None:
    limits = {"weight": tenant["weight"], **tenant["quota"]}
    if as_json:
        print_json(limits)
    else:
        print_table(["limit", "value"], limits.items())


@tenants.group("sources")
def sources() -> None:
    """Show or change what a tenant may register adapters from."""


@sources.command("list")
@click.argument("name")
@json_option
@with_api
def list_sources(name: str, as_json: bool, api: ApiClient) -> None:
    """List the sources that the tenant NAME may use."""
    found: dict[str, Any] = api.call("GET", f"/admin/tenants/{segment(name)}/sources")
    if as_json:
        print_json(found)
        return
    print_table(
        ["source", "credential", "granted in"],
        ([s["source"], s["credential"], s["granted_in"]] for s in found["data"]),
    )
    public = "may also use" if found["public_sources"] else "may not use"
    click.echo(f"{name} {public} what is public.", err=True)


@sources.command("allow")
@click.argument("name")
@click.argument("source")
@click.option("--credential", help="One of the operator's, by its name in LORAPLEX_SOURCES_FILE.")
@with_api
def allow_source(name: str, source: str, credential: str | None, api: ApiClient) -> None:
    """Let the tenant NAME register adapters from SOURCE: hf://org or s3://bucket/prefix."""
    body = {"source": source, "credential": credential}
    api.call("PUT", f"/admin/tenants/{segment(name)}/sources", json=body)
    click.echo(f"{name} may register adapters from {source}.")


@sources.command("withdraw")
@click.argument("name")
@click.argument("source")
@with_api
def withdraw_source(name: str, source: str, api: ApiClient) -> None:
    """Take SOURCE back from the tenant NAME; what it registered from there stays."""
    path = f"/admin/tenants/{segment(name)}/sources"
    api.call("DELETE", path, params={"source": source})
    click.echo(f"{name} may not register adapters from {source} any more.")


@tenants.command("suspend")
@click.argument("name")
@with_api
def suspend(name: str, api: ApiClient) -> None:
    """Refuse the keys of NAME from now on, and end what it has running."""
    api.call("POST", f"/admin/tenants/{segment(name)}/suspend")
    click.echo(f"Suspended {name}. To let it go on: loraplex tenants resume {name}")


@tenants.command("resume")
@click.argument("name")
@with_api
def resume(name: str, api: ApiClient) -> None:
    """Let the suspended tenant NAME go on."""
    api.call("POST", f"/admin/tenants/{segment(name)}/resume")
    click.echo(f"Resumed {name}.")


@tenants.command("rm")
@click.argument("name")
@click.option(
    "--with-usage", is_flag=True,
    help="Delete its usage rows too, and free its name; without, both are kept.",
)  # fmt: skip
@click.confirmation_option(prompt="Remove the tenant with its keys and adapters?")
@with_api
def rm(name: str, with_usage: bool, api: ApiClient) -> None:
    """Remove the tenant NAME with its keys and adapters."""
    usage = "delete" if with_usage else "keep"
    api.call("DELETE", f"/admin/tenants/{segment(name)}", params={"usage": usage})
    click.echo(f"Removed {name}.")
