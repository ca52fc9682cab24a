"""Structured output: which tokens a row's grammar allows next. Imports no torch.

A grammar is llguidance's own JSON text; the service makes it from a JSON schema and checks it.
"""
