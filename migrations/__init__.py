"""The registry's schema, step by step (Alembic); `loraplex.database` runs it, without an ini file.

A step is a module in `versions`. A test compares what all steps make with the registry's models.
"""
