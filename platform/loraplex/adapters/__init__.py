"""A tenant's adapters over HTTP: upload, versions, aliases."""
