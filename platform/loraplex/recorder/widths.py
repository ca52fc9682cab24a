"""How long buckets are, and how long they are kept; the windows of the pages, in buckets."""

from typing import Literal, NamedTuple

FINE, MINUTE, QUARTER = 10, 60, 900
"""Seconds of a bucket."""
KEPT_SECONDS = {FINE: 900, MINUTE: 25 * 3600, QUARTER: 8 * 86_400}
DETAIL_SECONDS = 25 * 3600
"""So long single requests and stays in slots are kept; alerts as long as quarters of an hour."""

Range = Literal["5m", "1h", "24h"]


class Span(NamedTuple):
    """A window up to now."""

    seconds: int
    width: int
    """Of its buckets."""


SPANS: dict[Range, Span] = {
    "5m": Span(300, FINE),
    "1h": Span(3600, MINUTE),
    "24h": Span(86_400, QUARTER),
}


def bucket(at: float, width: int) -> int:
    """When the bucket began that a time lies in."""
    return int(at // width) * width


def first_bucket(span: Span, now: float) -> int:
    """Of a window whose last bucket is the one that `now` lies in."""
    return bucket(now, span.width) - span.seconds + span.width
