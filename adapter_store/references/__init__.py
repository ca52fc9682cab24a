"""Adapters that are registered by reference: where they lie, who may name them, and the fetch."""
