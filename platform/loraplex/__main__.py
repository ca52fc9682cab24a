"""`python -m loraplex` is the `loraplex` command."""

from loraplex.cli import main

main()
