"""A `multipart/form-data` body as events: a part begins, its bytes, it ends."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

import multipart

from loraplex.errors import InvalidRequest

_MAX_PARTS = 16
# Typed by hand: another package of the same import name hides this one's types from checkers.
_multipart = cast(Any, multipart)


class PartStart(NamedTuple):
    """A part begins. Its file name, if it has one, is of no interest."""

    name: str


class PartEnd(NamedTuple):
    """The part is complete."""


async def multipart_events(
    content_type: str, chunks: AsyncIterator[bytes]
) -> AsyncIterator[PartStart | bytes | PartEnd]:
    """Parse a body as it comes; raises `InvalidRequest` for one that is malformed or cut short."""
    kind, options = _multipart.parse_options_header(content_type)
    boundary = options.get("boundary")
    if kind != "multipart/form-data" or not boundary:
        raise InvalidRequest(
            None, "the body must be multipart/form-data with a boundary", code="not_multipart"
        )
    try:
        with _multipart.PushMultipartParser(boundary, max_segment_count=_MAX_PARTS) as parser:
            async for chunk in chunks:
                for event in parser.parse(chunk) if chunk else ():
                    if event is None:
                        yield PartEnd()
                    elif isinstance(event, _multipart.MultipartSegment):
                        yield PartStart(event.name)
                    elif event:
                        yield bytes(event)
    except (_multipart.MultipartError, UnicodeError, ValueError) as error:
        raise InvalidRequest(
            None, f"the multipart body is malformed: {error}", code="invalid_multipart"
        ) from None
