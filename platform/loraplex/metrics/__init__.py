"""Prometheus metrics: the engine's, told by the engine, and this API process's own."""
