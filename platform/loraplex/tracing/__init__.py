"""OpenTelemetry traces of requests: off unless the standard `OTEL_*` variables turn them on."""
