"""Tracing as the service sees it: a request has a trace, and a call tells it what it took."""

from dataclasses import dataclass
from typing import Protocol

from litestar.types import ASGIApp

from engine.messages import RequestTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """What a generation call was, for its trace. No text, no tokens."""

    call_id: str
    tenant: str
    label: str
    """`name@N`, or the base's name."""
    model: str
    """The base model."""
    began: float
    """Unix seconds: when its requests went to the engine."""
    timing: RequestTiming
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    """As in its usage row."""


class Tracing(Protocol):
    """Chosen once, when a process starts."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The app, with a span around each request."""
        ...

    def call_over(self, report: CallReport) -> None:
        """Tell the span of the request under way what its call took; quick, and never waits."""
        ...

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        ...


class NoTracing:
    """Traces nothing, and costs nothing."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The app as it is."""
        return app

    def call_over(self, report: CallReport) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""
