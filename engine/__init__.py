"""Continuous batching over one base model and many LoRA adapters.

`scheduling`, `adapters` and `transport` decide and hold no tensor; `runner`, `models`, `ops`,
`device` and `triton` compute. `core.py` is the step loop that joins both sides. `messages.py` and
`client.py` are the seam to the service, `process.py` is what it starts.
"""
