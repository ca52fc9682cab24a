"""Lists in pages: `limit` entries, after the last one of the page before."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from litestar.params import QueryParameter

T = TypeVar("T")

PageLimit = Annotated[int, QueryParameter(ge=1, le=1000, description="Entries of a page.")]
PageAfter = Annotated[
    str, QueryParameter(max_length=64, description="`next` of the page before; default: the start.")
]
DEFAULT_LIMIT = 100


def cut(found: Sequence[T], limit: int) -> tuple[Sequence[T], bool]:
    """The page of `limit + 1` entries asked for, and whether there is another one after it."""
    return found[:limit], len(found) > limit
