"""Load on OpenAI-compatible endpoints: what is sent, when, and what its clients saw."""
