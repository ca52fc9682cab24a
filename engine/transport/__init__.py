"""The engine's socket, both ends of it."""
