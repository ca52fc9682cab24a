"""From a row of logits to a token: penalties, filters, counter-based noise, log-probabilities.

`Sampler` (in `sampler.py`) is the way in; the rest are pure functions. Nothing is imported here, so
that the scheduler's side can import the package's neighbours without torch.
"""
