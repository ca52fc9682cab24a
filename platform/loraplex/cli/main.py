"""The command group. Each command imports what it needs when it runs, so `--help` is quick."""

import importlib
import importlib.metadata
from typing import ClassVar

import click


class _LazyGroup(click.Group):
    """Loads a command's module only when that command is named."""

    commands_by_name: ClassVar[dict[str, tuple[str, str]]] = {
        "adapters": (
            "loraplex.cli.adapters:adapters",
            "Push, register, list, alias, pin, export and rm adapters.",
        ),
        "admin-keys": (
            "loraplex.cli.admin_keys:admin_keys",
            "Create, list and revoke admin keys, on the service's machine.",
        ),
        "bench": ("loraplex.cli.bench:bench", "Load an endpoint; measure what clients see."),
        "blobs": ("loraplex.cli.blobs:blobs", "Sweep the adapters' files, or see what is amiss."),
        "db": ("loraplex.cli.db:db", "Migrate the registry's database, or check it."),
        "demo": ("loraplex.cli.demo:demo", "Serve three adapters of two tenants on a real model."),
        "keys": ("loraplex.cli.keys:keys", "Create, list, rotate and revoke API keys."),
        "plan": ("loraplex.cli.plan:plan_command", "Size a deployment, and price it."),
        "serve": ("loraplex.cli.serve:serve", "Serve a base model and its tenants' adapters."),
        "simulate": ("loraplex.cli.simulate:simulate", "Try policies and rates in simulated time."),
        "tenants": ("loraplex.cli.tenants:tenants", "Create, list, suspend and rm tenants."),
        "usage": ("loraplex.cli.usage:usage", "Show what tenants used."),
        "verify": ("loraplex.cli.verify:verify", "Prove that an adapter is served exactly."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_by_name:
            return None
        module, _, attribute = self.commands_by_name[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(n, text) for n, (_, text) in sorted(self.commands_by_name.items())]
            )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("loraplex"), prog_name="loraplex")
def main() -> None:
    """Serve many LoRA adapters, owned by many tenants, over one base model."""
