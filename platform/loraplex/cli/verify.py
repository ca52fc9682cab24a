"""`loraplex verify`: proof that an adapter is served as PEFT computes it."""

import contextlib
import json
import logging
import sys
from collections.abc import Generator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog

from loraplex.cli.counted_work import CountedWork
from loraplex.cli.options import print_table

if TYPE_CHECKING:
    from loraplex.verification import Difference, Verification

PROMPTS = (
    "The capital of France is",
    "Write a short letter to a customer whose parcel is late.\n\n",
    "def fibonacci(n):\n",
)
SHOWN_WRONG = 10


@click.command()
@click.argument("adapter", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--base", metavar="DIR_OR_HUB_ID",
    help="The base model; default: the one that the adapter's config names.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1, 512), default=16, show_default=True,
              help="Length of each greedy reply.")  # fmt: skip
@click.option("--cpu-kernels", default="auto", show_default=True,
              help="The CPU path to prove: native, native/INSTRUCTION_SET or torch.")  # fmt: skip
@click.option("--all", "show_all", is_flag=True, help="Show every module and reply.")
@click.pass_context
def verify(
    ctx: click.Context, adapter: Path, base: str | None, max_tokens: int, cpu_kernels: str,
    show_all: bool,
) -> None:  # fmt: skip
    """Prove that ADAPTER, a PEFT folder, is served exactly as PEFT computes it.

    Every module and three greedy replies are computed in float32 by PEFT and by the engine, alone
    and in a batch with the base model and another adapter. Differences are relative to the largest
    value. The worst are shown. Exit status 1 where one is too large or a token differs.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter / name).is_file():
            raise click.ClickException(f"{adapter} is no PEFT adapter: it has no {name}")
    found = _verified(adapter, base, max_tokens, cpu_kernels)
    _print(found, show_all=show_all)
    if found.holds:
        click.echo(f"{adapter} is served exactly.")
    else:
        click.echo(f"{adapter} is NOT served exactly.", err=True)
        ctx.exit(1)


def _verified(adapter: Path, base: str | None, max_tokens: int, cpu_kernels: str) -> "Verification":
    """Compare, and say what cannot be compared in the words of the command line."""
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
        compared = count(1)
        work = CountedWork(f"Comparing {adapter} with PEFT, module by module ...")
        with _only_warnings(), work:
            return verify_adapter(
                adapter, model_dir, prompts, max_tokens=max_tokens, cpu_kernels=cpu_kernels,
                on_compared=lambda part: work.update(next(compared), part),
            )  # fmt: skip
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


def _print(found: "Verification", *, show_all: bool) -> None:
    click.echo(f"adapter {found.digest[:12]}, kernels {found.kernels}, float32")
    parts = [*found.modules, *found.replies]
    shown = parts if show_all else _worst(found)
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
            for part in shown
        ),
    )
    if len(shown) < len(parts):
        num_wrong = sum(not part.holds for part in parts)
        click.echo(
            f"The worst of {len(found.modules)} modules and {len(found.replies)} replies"
            f"{f', of which {num_wrong} are wrong' if num_wrong else ''}; --all shows every one."
        )


@contextlib.contextmanager
def _only_warnings() -> Generator[None]:
    """Of the engine's log, on standard error: what it is told here stands in the first line."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _worst(found: "Verification") -> list["Difference"]:
    """The worst module and the worst reply; of wrong ones some, the worst first."""
    return [*_worst_of(found.modules), *_worst_of(found.replies)]


def _worst_of(parts: Sequence["Difference"]) -> list["Difference"]:
    ordered = sorted(parts, key=lambda part: (part.holds, -part.share))
    wrong = [part for part in ordered if not part.holds]
    return wrong[:SHOWN_WRONG] or ordered[:1]


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
