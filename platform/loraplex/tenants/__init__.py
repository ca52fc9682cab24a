"""Tenants and their keys, for an admin."""
