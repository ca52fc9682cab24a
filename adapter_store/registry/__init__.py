"""The registry: tenants, keys, adapters, versions, aliases, usage and audit, in SQL."""
