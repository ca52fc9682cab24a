"""The `loraplex` command."""

from loraplex.cli.main import main

__all__ = ["main"]
