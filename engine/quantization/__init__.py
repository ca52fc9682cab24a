"""A base whose layers are held in fewer bits; adapters stay as they are."""
