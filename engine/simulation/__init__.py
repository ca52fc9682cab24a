"""The real scheduler on a simulated clock: no model, no threads, no torch."""
