"""Runs scheduled batches: where the tensors are."""
