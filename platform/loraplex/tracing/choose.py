"""Whether there are traces, from the standard variables."""

from collections.abc import Mapping
from importlib.util import find_spec

from loraplex.settings import SettingsError
from loraplex.tracing.tracing import NoTracing, Tracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def is_traced(environ: Mapping[str, str]) -> bool:
    """Whether traces go out: an OTLP endpoint is named, or the exporter `otlp` asked for.

    Raises `SettingsError` where the variables ask for what is not supported or not installed.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter == "none" or not (exporter or any(environ.get(name) for name in _ENDPOINTS)):
        return False
    if exporter not in ("", "otlp"):
        raise SettingsError(f"OTEL_TRACES_EXPORTER={exporter}: only `otlp` and `none` are known")
    for name in _PROTOCOLS:
        if environ.get(name, _PROTOCOL) != _PROTOCOL:
            raise SettingsError(f"{name}={environ[name]}: only {_PROTOCOL} is spoken")
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise SettingsError("OTEL_* variables ask for traces: install loraplex[otel]")
    return True


def open_tracing(environ: Mapping[str, str]) -> Tracing:
    """The tracing that the variables ask for; raises `SettingsError`."""
    if not is_traced(environ):
        return NoTracing()
    from loraplex.tracing.otel import OtelTracing

    return OtelTracing(environ)
