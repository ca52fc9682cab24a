"""Counts every reply as it begins, whatever made it."""

from litestar.types import Message, Scope

from loraplex.metrics.process_metrics import OTHER, ProcessMetrics


async def count_reply(message: Message, scope: Scope) -> None:
    """Litestar `before_send` hook."""
    if message["type"] != "http.response.start" or scope["type"] != "http":
        return
    counts: ProcessMetrics | None = scope["litestar_app"].state.get("process_metrics")
    if counts is not None:
        route = scope.get("path_template") or OTHER  # what nobody serves has no route
        counts.replied(scope["method"], route, message["status"])
