"""The OpenAI-compatible surface."""
