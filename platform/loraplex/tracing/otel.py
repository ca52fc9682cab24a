"""Traces over OpenTelemetry's SDK: a span a request, with the engine's parts of it beneath.

The engine imports no SDK: its spans are made here, when a call is over, from the timings that came
back with its reply. Spans leave in batches, on a thread.
"""

import asyncio
import time
from collections.abc import Mapping

import structlog
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from loraplex.tracing.tracing import CallReport

TRACE_HEADER = b"x-loraplex-trace-id"
_PROPAGATED = (b"traceparent", b"tracestate", b"baggage")
_UNTRACED = "/health"
_CLOSE_SECONDS = 3.0
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class OtelTracing:
    """Exporter, sampler, batches and resource are set by the SDK's own `OTEL_*` variables."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        named = {"OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"} & environ.keys()
        resource = Resource.create({} if named else {"service.name": "loraplex"})
        # A provider of our own, not the process's: nothing else here is to find it.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter()
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("loraplex")

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The app with a span around each request, whose trace id is in its logs and its reply."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"].startswith(_UNTRACED):
                await app(scope, receive, send)
                return
            await self._trace_request(app, scope, receive, send)

        return traced

    def call_over(self, report: CallReport) -> None:
        """Attributes for the request's span, and a span for each part of the call."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        timing = report.timing
        span.set_attributes(_attributes(report))
        queue = {f"loraplex.queue.{cause}": seconds for cause, seconds in timing.queue.items()}
        began = report.began
        for name, seconds, attributes in (
            ("queue", timing.queue_seconds, queue),
            ("prefill", timing.prefill, {}),
            ("decode", timing.decode, {}),
        ):
            part = self._tracer.start_span(
                f"engine {name}", start_time=_ns(began), attributes=attributes
            )
            began += seconds
            part.end(_ns(began))

    async def close(self) -> None:
        """Send what is left; a collector that is away is not tried again for long."""
        give_up = asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._exporter.shutdown)
        await asyncio.to_thread(self._provider.shutdown)
        give_up.cancel()

    async def _trace_request(
        self, app: ASGIApp, scope: HTTPScope, receive: Receive, send: Send
    ) -> None:
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _PROPAGATED
        }
        span = self._tracer.start_span(
            _method(scope), propagate.extract(carrier), SpanKind.SERVER, start_time=time.time_ns()
        )
        trace_id = trace.format_trace_id(span.get_span_context().trace_id)

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (TRACE_HEADER, trace_id.encode())]
                message["headers"] = headers
                _note_reply(span, scope, message["status"])
            await send(message)

        with (
            trace.use_span(span, record_exception=False, set_status_on_exception=False),
            structlog.contextvars.bound_contextvars(trace_id=trace_id),
        ):
            try:
                await app(scope, receive, telling)
            finally:
                span.end()


def _method(scope: HTTPScope) -> str:
    """As the conventions want it: a client may call anything a method."""
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"


def _note_reply(span: Span, scope: HTTPScope, status: int) -> None:
    route = scope.get("path_template") or ""
    span.update_name(f"{_method(scope)} {route}".strip())
    span.set_attributes(
        {
            "http.request.method": _method(scope),
            "http.route": route,
            "http.response.status_code": status,
        }
    )
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def _attributes(report: CallReport) -> dict[str, AttributeValue]:
    timing = report.timing
    return {
        "gen_ai.request.model": report.model,
        "gen_ai.response.id": report.call_id,
        "gen_ai.response.finish_reasons": report.finish_reason.split(","),
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        "loraplex.tenant": report.tenant,
        "loraplex.adapter": report.label,
        "loraplex.cached_tokens": report.cached_tokens,
        "loraplex.preemptions": timing.preemptions,
        "loraplex.queue_seconds": timing.queue_seconds,
        **{f"loraplex.queue.{cause}": seconds for cause, seconds in timing.queue.items()},
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
