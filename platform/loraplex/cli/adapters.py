"""`loraplex adapters`: a tenant's adapters. Needs a key with the scope `tenant`, or an admin's
and `--tenant`.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from loraplex.cli.adapter_versions import export, rm, unalias
from loraplex.cli.api_client import ApiClient, segment
from loraplex.cli.options import (
    json_option,
    print_json,
    print_table,
    to_the_second,
    with_tenant_api,
)

_POLL_SECONDS = 0.5


def _with_serving(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how a version is served."""
    for option in (
        click.option(
            "--sampling", metavar="JSON",
            help='Where requests say nothing, such as {"temperature": 0.2}.',
        ),
        click.option(
            "--stop-token", multiple=True, help="A token that ends every reply; repeatable."
        ),
        click.option(
            "--chat-template", type=click.File(encoding="utf-8"),
            help="Jinja, in place of the model's.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def _json_object(text: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.UsageError('--sampling must be a JSON object, such as {"temperature": 0.2}')
    return cast(dict[str, Any], found)


@click.group()
def adapters() -> None:
    """Push, register, list, alias, pin, export and rm adapters."""


@adapters.command("push")
@click.argument("name")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--no-publish", is_flag=True, help="Register the version; leave `default` in place.")
@_with_serving
@json_option
@with_tenant_api
def push(
    name: str,
    source: Path,
    no_publish: bool,
    chat_template: TextIO | None,
    stop_token: tuple[str, ...],
    sampling: str | None,
    as_json: bool,
    api: ApiClient,
) -> None:
    """Upload SOURCE, a PEFT folder or a zip of one, as the next version of NAME."""
    serving: dict[str, str] = {}
    if chat_template is not None:
        serving["chat_template"] = chat_template.read()
    if stop_token:
        serving["stop_tokens"] = json.dumps(stop_token)
    if sampling is not None:
        serving["defaults"] = sampling
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as progress:
        reply = api.push_adapter(
            name, source, publish=not no_publish, serving=serving, progress=progress
        )
    if as_json:
        print_json(reply)
        return
    state = "unchanged" if reply.get("unchanged") else "registered"
    aliases: dict[str, int] = api.call("GET", f"/v1/adapters/{segment(name)}")["aliases"]
    means = "still means" if no_publish else "now means"
    default = f"{means} @{aliases['default']}" if "default" in aliases else "means no version yet"
    click.echo(
        f"{reply['name']}@{reply['version']} {state}, digest {reply['digest'][:12]}; "
        f"{reply['name']} {default}"
    )
    base: dict[str, Any] = reply["report"].get("base_match", {})
    if base.get("same_name") is False:
        click.echo(
            f"note: the adapter's config names the base {base['declared']}; this service has "
            f"{base['name']}, whose shapes are the same",
            err=True,
        )
    for warning in reply["report"].get("warnings", []):
        click.echo(f"warning: {warning}", err=True)


@adapters.command("register")
@click.argument("name")
@click.argument("source")
@click.option("--no-publish", is_flag=True, help="Register the version; leave `default` in place.")
@click.option("--no-wait", is_flag=True, help="Print the registration's id and return at once.")
@_with_serving
@json_option
@with_tenant_api
def register(
    name: str,
    source: str,
    no_publish: bool,
    no_wait: bool,
    chat_template: TextIO | None,
    stop_token: tuple[str, ...],
    sampling: str | None,
    as_json: bool,
    api: ApiClient,
) -> None:
    """Have the service fetch SOURCE as the next version of NAME.

    SOURCE is hf://org/name@revision, s3://bucket/prefix or, for admins, file:///folder.
    """
    order: dict[str, Any] = {"name": name, "source": source, "publish": not no_publish}
    if chat_template is not None:
        order["chat_template"] = chat_template.read()
    if stop_token:
        order["stop_tokens"] = stop_token
    if sampling is not None:
        order["defaults"] = _json_object(sampling)
    found: dict[str, Any] = api.call("POST", "/v1/adapters", json=order)
    if not no_wait:
        found = _ended(api, found, quiet=as_json)
    if as_json:
        print_json(found)
    elif found["state"] == "ready":
        state = "unchanged" if found["unchanged"] else "registered"
        click.echo(
            f"{name}@{found['version']} {state}, digest {found['digest'][:12]}, "
            f"from {found['source']}"
        )
    elif found["state"] != "failed":
        click.echo(f"{found['id']} is {found['state']}")
    if (error := found["error"]) is not None:
        raise click.ClickException(f"{error['message']} ({error['code']})")


def _ended(api: ApiClient, found: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Follow a registration to its end."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(found["state"], total=None)
        while found["state"] not in ("ready", "failed"):
            time.sleep(_POLL_SECONDS)
            found = api.call("GET", f"/v1/registrations/{segment(found['id'])}")
            progress.update(
                task, description=found["state"], completed=found["received_bytes"],
                total=found["total_bytes"],
            )  # fmt: skip
    return found


@adapters.command("list")
@json_option
@with_tenant_api
def list_(as_json: bool, api: ApiClient) -> None:
    """List the tenant's adapters."""
    found = api.list_all("/v1/adapters")
    if as_json:
        print_json(found)
        return
    print_table(
        ["adapter", "default", "versions", "other aliases", "residency"],
        (
            [
                a["name"],
                _means(a, "default") if "default" in a["aliases"] else None,
                a["versions"],
                " ".join(
                    f"{alias}={_means(a, alias)}"
                    for alias in sorted(a["aliases"])
                    if alias != "default"
                )
                or None,
                a["residency"],
            ]
            for a in found["data"]
        ),
    )


@adapters.command("show")
@click.argument("name")
@json_option
@with_tenant_api
def show(name: str, as_json: bool, api: ApiClient) -> None:
    """Show the versions of NAME."""
    found = api.list_all(f"/v1/adapters/{segment(name)}/versions")
    if as_json:
        print_json(found)
        return
    adapter: dict[str, Any] = api.call("GET", f"/v1/adapters/{segment(name)}")
    print_table(
        ["version", "aliases", "state", "digest", "rank", "size", "created"],
        (
            [
                v["version"],
                " ".join(_aliases_of(adapter, v["version"])) or None,
                v["state"],
                v["digest"][:12],
                v["rank"],
                decimal(v["bytes"]),
                to_the_second(v["created_at"]),
            ]
            for v in found["data"]
        ),
    )


def _means(adapter: dict[str, Any], alias: str) -> str:
    """An alias's version such as `1`, and with a canary `1+2@10%`."""
    canary = adapter.get("canaries", {}).get(alias)
    trial = "" if canary is None else f"+{canary['version']}@{_percent(canary['share'])}"
    return f"{adapter['aliases'][alias]}{trial}"


def _aliases_of(adapter: dict[str, Any], version: int) -> list[str]:
    """Aliases that mean a version, and with their share those whose canary it is."""
    means = [alias for alias, v in sorted(adapter["aliases"].items()) if v == version]
    tries = [
        f"{alias}@{_percent(canary['share'])}"
        for alias, canary in sorted(adapter.get("canaries", {}).items())
        if canary["version"] == version
    ]
    return [*means, *tries]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


@adapters.command("alias")
@click.argument("name")
@click.argument("version", type=click.IntRange(1))
@click.option("--alias", default="default", show_default=True, help="The alias to move.")
@click.option("--expect", type=click.IntRange(1), help="Move it only if it points there now.")
@click.option("--canary", type=click.IntRange(1), help="A version that gets a share of requests.")
@click.option("--share", type=click.FloatRange(0, 1), help="The canary's share, 0 to 1.")
@json_option
@with_tenant_api
def alias_(
    name: str, version: int, alias: str, expect: int | None, canary: int | None,
    share: float | None, as_json: bool, api: ApiClient,
) -> None:  # fmt: skip
    """Point an alias of NAME to VERSION: `default` is what the bare name means."""
    if (canary is None) != (share is None):
        raise click.UsageError("--canary and --share go together")
    move: dict[str, Any] = {"version": version} | ({} if expect is None else {"expect": expect})
    if canary is not None:
        move["canary"] = {"version": canary, "share": share}
    path = f"/v1/adapters/{segment(name)}/aliases/{segment(alias)}"
    moved: dict[str, Any] = api.call("PUT", path, json=move)
    if as_json:
        print_json(moved)
        return
    before = "nothing" if moved["previous"] is None else f"@{moved['previous']}"
    trial = "" if canary is None else f" (and for {share:.1%} of requests @{canary})"
    click.echo(f"{name}:{alias} now means @{version}{trial}, before it was {before}")


def _residency_command(residency: str, text: str) -> None:
    @adapters.command(residency, help=text)
    @click.argument("name")
    @json_option
    @with_tenant_api
    def set_residency(name: str, as_json: bool, api: ApiClient) -> None:
        changed: dict[str, Any] = api.call(
            "PUT",
            f"/v1/adapters/{segment(name)}/residency",
            json={"residency": "pinned" if residency == "pin" else residency},
        )
        if as_json:
            print_json(changed)
        else:
            click.echo(f"{name} is {changed['residency']}")


_residency_command("pin", "Let NAME keep an adapter slot; needs an admin key and --tenant.")
_residency_command("warm", "Keep NAME in host memory, ready for a slot.")
_residency_command("auto", "Let NAME come and go with its use.")


for _command in (export, rm, unalias):
    adapters.add_command(_command)
