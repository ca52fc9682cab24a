"""Adapters on their way to the engine: fetched, read, kept."""
