"""Adapters as data: PEFT validation, the registry, and blobs."""
