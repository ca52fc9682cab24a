"""`loraplex verify`: proof that an adapter is served as PEFT computes it."""

import json
from pathlib import Path
from typing import Any

import click

from loraplex.cli.options import print_table

PROMPTS = (
    "The capital of France is",
    "Write a short letter to a customer whose parcel is late.\n\n",
    "def fibonacci(n):\n",
)


@click.command()
@click.argument("adapter", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--base", metavar="DIR_OR_HUB_ID",
    help="The base model; default: the one that the adapter's config names.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1, 512), default=16, show_default=True,
              help="Length of each greedy reply.")  # fmt: skip
@click.option("--kernels", default="auto", show_default=True,
              help="The CPU path to prove: native, native/INSTRUCTION_SET or torch.")  # fmt: skip
@click.pass_context
def verify(
    ctx: click.Context, adapter: Path, base: str | None, max_tokens: int, kernels: str
) -> None:
    """Prove that ADAPTER, a PEFT folder, is served exactly as PEFT computes it.

    Every module and three greedy replies are computed in float32 by PEFT and by the engine, alone
    and in a batch with the base model and another adapter. Differences are relative to the largest
    value. Exit status 1 where one is too large or a token differs.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter / name).is_file():
            raise click.ClickException(f"{adapter} is no PEFT adapter: it has no {name}")
    import transformers

    from adapter_store.errors import AdapterStoreError
    from engine.errors import AdapterUnavailable, ConfigError
    from engine.text.tokenizer import Tokenizer
    from loraplex.supervisor.serve_options import ServeError
    from loraplex.supervisor.served_model import resolve_model
    from loraplex.verification import VerificationError, verify_adapter

    transformers.utils.logging.disable_progress_bar()
    name = base or _base_of(adapter)
    try:
        model_dir = resolve_model(name)
        tokenizer = Tokenizer.from_pretrained(model_dir)
        prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
        found = verify_adapter(
            adapter, model_dir, prompts, max_tokens=max_tokens, cpu_kernels=kernels
        )
    except ServeError as error:
        if base:
            raise click.ClickException(str(error).replace("--model", "--base", 1)) from error
        named = f"{name} (the base that {adapter / 'adapter_config.json'} names)"
        said = str(error).replace(f"--model {name}", named, 1)
        raise click.ClickException(f"{said}. Give --base DIR") from error
    except (
        VerificationError,
        ConfigError,
        AdapterStoreError,
        AdapterUnavailable,
    ) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        where = error.filename or adapter
        raise click.ClickException(f"{where} cannot be read: {error.strerror or error}") from error
    click.echo(f"adapter {found.digest[:12]}, kernels {found.kernels}, float32")
    print_table(
        ["compared", "rank", "alone", "in a mixed batch", "at most", ""],
        (
            [
                part.name,
                part.rank,
                f"{part.solo:.1e}",
                f"{part.mixed:.1e}",
                f"{part.tolerance:.0e}",
                "ok" if part.holds else "tokens differ" if not part.tokens_agree else "TOO LARGE",
            ]
            for part in (*found.modules, *found.replies)
        ),
    )
    if found.holds:
        click.echo(f"{adapter} is served exactly.")
    else:
        click.echo(f"{adapter} is NOT served exactly.", err=True)
        ctx.exit(1)


def _base_of(adapter: Path) -> str:
    path = adapter / "adapter_config.json"
    try:
        config: Any = json.loads(path.read_bytes())
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise click.ClickException(f"{path} names no base model; give --base") from error
    if not isinstance(name, str) or not name:
        raise click.ClickException(f"{path} names no base model; give --base")
    return name
